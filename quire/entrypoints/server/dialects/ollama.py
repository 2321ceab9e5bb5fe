"""The dialect of Ollama's /api/chat and /api/generate: its names in, its objects out.

`EventService` calls it. The body is read as a chat's, a raw prompt as a completion's.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from quire.entrypoints.server import ollama_requests as forms
from quire.entrypoints.server.completion_request import OtherCompletion
from quire.entrypoints.server.dialects.chat import token_logprobs
from quire.entrypoints.server.dialects.completions import read_other_completion
from quire.entrypoints.server.dialects.through_chat import read_through_chat, renamed, within_context
from quire.entrypoints.server.errors import ErrorInfo
from quire.entrypoints.server.event_service import Event, EventWriter
from quire.entrypoints.server.parsers.base import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from quire.entrypoints.server.parsers.reader import is_object
from quire.entrypoints.server.requests_common import SAME, AnyRequest, GenerationRequest, wrong
from quire.entrypoints.server.responses import TokenLogprob, encode
from quire.entrypoints.server.service import Asked, TurnRequest
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.timings import timings_of
from quire.entrypoints.server.turn import ContentEvent, Delta, Turn
from quire.errors import InvalidRequestError

_NAMES = {name: f"options.{name}" for name in SAME} | {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
}
_EFFORTS = {True: "medium", False: "none"}


async def read_ollama(state: ServerState, body: forms.OllamaQuestion, request_id: str) -> Asked["OllamaWriter"]:
    """See `Read`."""
    state.unknown_fields.note(body)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    fields, plain = _fields(body), GenerationRequest.model_validate({"model": body.model, "stream": body.stream})
    tokenizer, raw = state.llm.tokenizer, None
    if isinstance(body, forms.OllamaChatRequest):
        fields |= {"messages": _messages(body.messages), "tools": body.tools}
    else:
        template = None if tokenizer is None else state.args.chat_template or tokenizer.chat_template
        told = [("system", body.system), ("user", body.prompt)]
        fields["messages"] = [{"role": role, "content": text} for role, text in told if text]
        if body.raw or template is None:
            raw = "\n".join(text for role, text in told if text and not (body.raw and role == "system"))

    async def read(limit: int | None) -> tuple[TurnRequest, Turn]:
        if raw is None:
            asked = fields | {"max_tokens": limit, "logprobs": num_top is not None, "top_logprobs": num_top}
            turn, writer = await read_through_chat(state, plain, request_id, asked, _NAMES)
            if "think" in (plain.model_extra or ()):
                raise InvalidRequestError("think is of no use: this model's chat template has no thoughts.", "think")
            return turn, writer.turn
        own = {name: value for name, value in fields.items() if name in OtherCompletion.model_fields}
        own |= {"prompt": raw, "logprobs": num_top, **plain.model_dump(exclude_unset=True)}
        with renamed(_NAMES | {"logprobs": "top_logprobs"}):
            turn, completion = await read_other_completion(state, own, limit, request_id)
        return turn, completion.turn

    limit = (body.options and body.options.num_predict) or 0
    request, turn = await within_context(read, limit if limit >= 1 else None, _NAMES["max_tokens"])
    return request, OllamaWriter(state, body, turn, len(request.prompts[0].token_ids), num_top)


class OllamaWriter(EventWriter):
    """Writes one answer. See `EventWriter`. `num_top`: None where no logprobs were asked for."""

    def __init__(
        self, state: ServerState, body: forms.OllamaQuestion, turn: Turn, num_prompt_tokens: int, num_top: int | None
    ) -> None:
        self.turn, self._num_top, self._tokenizer = turn, num_top, state.llm.tokenizer
        self._num_prompt_tokens = num_prompt_tokens
        self._piece = partial(_piece, body, state.check_model(body.model))
        self._text, self._thought = list[str](), list[str]()
        self._calls: list[dict[str, Any]] = []
        self._begun, self._arguments = ToolCallStart(0, "", ""), ""  # of the latest one
        self._logprobs: list[TokenLogprob] = []

    def take(self, delta: Delta) -> list[Event]:
        events = super().take(delta)
        if self._num_top is not None and (told := token_logprobs(delta, self._num_top, tokenizer=self._tokenizer)):
            self._logprobs += told
            events = events or [self._piece()]
            events[0]["logprobs"] = told
        return events

    def part(self, part: ContentEvent) -> list[Event]:
        match part:
            case TextDelta(text):
                self._text.append(text)
                return [self._piece(text)]
            case ReasoningDelta(text):
                self._thought.append(text)
                return [self._piece(thought=text)]
            case ToolCallStart():
                self._begun, self._arguments = part, ""
            case ToolCallDelta():
                self._arguments += part.arguments
            case ToolCallEnd() if is_object(self._arguments):  # else it was cut, and would be called without them
                own = {"index": part.number, "name": self._begun.name, "arguments": json.loads(self._arguments)}
                self._calls.append({"id": self._begun.id, "function": own})
                return [self._piece(calls=self._calls[-1:])]
        return []

    async def close(self) -> list[Event]:
        return [self._piece() | self._end()]

    def fail(self, error: ErrorInfo) -> list[Event]:
        return [{"error": error.message}]

    def answer(self) -> dict[str, Any]:
        told = {} if self._num_top is None else {"logprobs": self._logprobs}
        return self._piece("".join(self._text), "".join(self._thought), self._calls) | self._end() | told

    def _end(self) -> dict[str, Any]:
        """Why it ended, what it took; times in nanoseconds."""
        reason = "length" if self.finish is not None and self.finish.reason == "length" else "stop"
        num_input, num_output, _ = self.turn.counts()
        timings, names = timings_of(self.turn), ("queue_ms", "prompt_ms", "predicted_ms")
        queue, prompt, output = (int(1e6 * getattr(timings, name, 0)) for name in names)
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": queue + prompt + output,
            "load_duration": queue,
            "prompt_eval_count": num_input or self._num_prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": num_output,
            "eval_duration": output,
        }


def line(event: Event) -> bytes:
    """A line of a stream of JSON objects."""
    return encode(event) + b"\n"


def loaded(body: AnyRequest, model: str) -> dict[str, Any]:
    """The answer to a request that asks for nothing."""
    return _piece(body, model) | {"done": True, "done_reason": "load"}


def _piece(
    body: AnyRequest, model: str, text: str = "", thought: str = "", calls: Sequence[dict[str, Any]] = ()
) -> Event:
    """Some of an answer."""
    head = {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
    more: dict[str, Any] = {"thinking": thought} if thought else {}
    if not isinstance(body, forms.OllamaChatRequest):
        return {**head, "response": text, **more, "done": False}
    more |= {"tool_calls": [*calls]} if calls else {}
    return {**head, "message": {"role": "assistant", "content": text, **more}, "done": False}


def _fields(body: forms.OllamaRequest) -> dict[str, Any]:
    """The fields of a chat request that asks for the same, but for the conversation and its end."""
    fields = {} if body.options is None else body.options.openai_fields()
    if isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format:
        if body.format != "json":
            raise wrong("format", "'json' or a schema", body.format)
        fields["response_format"] = {"type": "json_object"}
    if body.think is not None:
        fields["reasoning_effort"] = body.think if isinstance(body.think, str) else _EFFORTS[body.think]
    return {name: value for name, value in fields.items() if value is not None}


def _messages(given: list[forms.OllamaMessage]) -> list[dict[str, Any]]:
    """Messages as OpenAI has them: calls have ids, and a result without one is of the first open call (of its name).

    A result may come without its call, as Ollama takes it.
    """
    messages: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # calls without a result
    for place, one in enumerate(given):
        message: dict[str, Any] = {"role": one.role, "content": one.content or "", "thinking": one.thinking}
        if one.tool_calls:
            calls = [_call(call, f"messages[{place}].tool_calls[{i}]") for i, call in enumerate(one.tool_calls)]
            message["tool_calls"], waiting = calls, [*calls]
        if one.role == "tool":
            own = [call for call in waiting if one.tool_call_id == call["id"]]
            own += [call for call in waiting if one.tool_name in (None, call["function"]["name"])]
            message["name"] = one.tool_name
            for call in own[:1]:
                waiting.remove(call)
                message |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
        messages.append(message)
    return messages


def _call(given: dict[str, Any], where: str) -> dict[str, Any]:
    function = given.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(f"{where}.function", "an object with a name", function, "messages")
    own = {"name": function["name"], "arguments": json.dumps(function.get("arguments") or {})}
    return {"id": given.get("id") or where, "type": "function", "function": own}
