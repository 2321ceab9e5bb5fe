"""The dialect of /v1/responses: input items in, OpenAI's response object and its events out.

`ResponsesService` calls it, and keeps what it makes. The conversation is read as a chat's (`through_chat`). The object
and its events hold OpenAI's fields, no less (published schema, tests/server).
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.server.dialects.chat import ChatWriter
from quire.entrypoints.server.dialects.responses_input import Item, chat_fields, messages_of, read_items, without_oldest
from quire.entrypoints.server.dialects.through_chat import read_through_chat
from quire.entrypoints.server.errors import ErrorInfo
from quire.entrypoints.server.event_service import Event, EventWriter
from quire.entrypoints.server.parsers.base import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from quire.entrypoints.server.parsers.reader import is_object
from quire.entrypoints.server.responses import TokenLogprob
from quire.entrypoints.server.responses_request import ResponsesRequest, flat_name
from quire.entrypoints.server.service import Asked
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.turn import ContentEvent, Delta
from quire.errors import InvalidRequestError

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}
# Of the request, shown in the response as they were asked for.
_ECHOED = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "truncation": "disabled",
    "background": False,
    "metadata": {},
    "prompt_cache_key": None,
    "safety_identifier": None,
}

_FEW_PARTS = 100  # of an input, that are read on the event loop: less work than going to a thread
_NEAR = 8  # characters

Find = Callable[[str], Awaitable[dict[str, Any]]]


async def read_response(
    state: ServerState, body: ResponsesRequest, request_id: str, context: list[Item], find: Find
) -> Asked["ResponseWriter"]:
    """Check everything before anything is queued.

    Args:
        context: items of the responses before it.
        find: awaits the item of an id that an input refers to.

    Raises:
        InvalidRequestError, OverloadedError: as `Read`.
    """
    stem = uuid.uuid4().hex  # of the new response's id, and of its items' ids
    model = state.admit(body)
    _check_metadata(body)
    is_short = _num_parts(body.input) <= _FEW_PARTS
    given = read_items(body.input, stem) if is_short else await asyncio.to_thread(read_items, body.input, stem)
    items = context + [await find(item["id"]) if item["type"] == "item_reference" else item for item in given]
    request, chat = await _read_fitting(state, body, request_id, items)
    head = {
        "id": f"resp_{stem}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress",
        "model": model,
        "temperature": request.params.temperature,
        "top_p": request.params.top_p,
        **_echo(body),
    }
    try:
        msgspec.msgpack.encode(head)  # as it will be kept
    except OverflowError:
        raise InvalidRequestError("the request holds an integer of more than 64 bits; write it as text.") from None
    return request, ResponseWriter(state.llm, head, items, chat)


async def _read_fitting(
    state: ServerState, body: ResponsesRequest, request_id: str, items: list[Item]
) -> Asked[ChatWriter]:
    """Read the items; where they are too long and may be cut, without as few of the oldest as need be."""
    fields = chat_fields(body)

    async def attempt(num_out: int) -> Asked[ChatWriter]:
        given = fields | {"messages": messages_of(without_oldest(items, num_out), body.instructions)}
        return await read_through_chat(state, body, request_id, given, _NAMES)

    fitting, low, num_out = None, 0, 0
    high = len(items) - 1 if body.truncation == "auto" else 0
    while fitting is None or low < high:
        try:
            fitting, high = await attempt(num_out), num_out
        except InvalidRequestError as error:
            if error.code != "context_length_exceeded" or low == high:
                raise
            low = num_out + 1
        num_out = (low + high) // 2
    return fitting


def _num_parts(given: str | list[Item]) -> int:
    """How much there is to read: items, and what they list; perhaps hundreds of thousands."""
    if isinstance(given, str):
        return 1
    return sum(1 + sum(len(part) for part in item.values() if isinstance(part, list)) for item in given)


def _check_metadata(body: ResponsesRequest) -> None:
    pairs = body.metadata or {}
    if len(pairs) > 16 or not all(isinstance(v, str) and len(k) <= 64 and len(v) <= 512 for k, v in pairs.items()):
        message = "metadata must be at most 16 texts of at most 512 characters, by keys of at most 64."
        raise InvalidRequestError(message, "metadata")


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """What the response shows of the request."""
    shown = {name: value if (value := getattr(body, name)) is not None else plain for name, plain in _ECHOED.items()}
    text, reasoning = body.text, body.reasoning
    shown["text"] = {"format": (text and text.format) or {"type": "text"}, "verbosity": text and text.verbosity}
    shown["reasoning"] = {"effort": reasoning and reasoning.effort, "summary": None}
    plain = {"strict": True, "parameters": None}
    shown["tools"] = [tool if tool.get("type") == "namespace" else plain | tool for tool in body.tools or ()]
    shown["service_tier"] = "default"
    return shown


class ResponseWriter(EventWriter):
    """Writes one response. See `EventWriter`.

    Attributes:
        items: the whole input, with what came before it.
    """

    def __init__(self, llm: AsyncLLM, head: dict[str, Any], items: list[dict[str, Any]], chat: ChatWriter) -> None:
        self.turn, self.items, self._llm = chat.turn, items, llm
        spaces = [(space["name"], space["tools"]) for space in head["tools"] if space.get("type") == "namespace"]
        pairs = [{"namespace": name, "name": tool.get("name")} for name, tools in spaces for tool in tools]
        self._names = {flat_name(pair): pair for pair in pairs}
        self._chat, self._head, self._stem = chat, head, head["id"].removeprefix("resp_")
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item under way, which is the last
        self._pieces: list[str] = []  # of its text or arguments
        self._logprobs: list[dict[str, Any]] = []  # of its text
        self._waiting: list[dict[str, Any]] = []  # of tokens whose text is still to come,
        self._raw = ""  # and what they brought the parser
        self._num_left = 0  # parts of a delta that are still to come
        self._thoughts: list[str] = []
        self._number = -1  # of the last event
        self._end: dict[str, Any] = {"error": None, "incomplete_details": None, "completed_at": None}  # and usage

    @property
    def id(self) -> str:
        """The response's."""
        return self._head["id"]

    @property
    def is_open(self) -> bool:
        """Whether more is to come."""
        return self._head["status"] in ("queued", "in_progress")

    def answer(self) -> dict[str, Any]:
        return {**self._head, **self._end, "output": list(self._output)}

    def open(self) -> list[Event]:
        events = [self._event("response.created", response=self.answer())]
        if self._head["status"] == "queued":
            events.append(self._event("response.queued", response=self.answer()))
            self._head["status"] = "in_progress"
        return [*events, self._event("response.in_progress", response=self.answer())]

    def take(self, delta: Delta) -> list[Event]:
        if (logprobs := self._chat.logprobs(delta)) is not None:
            self._waiting += [_logprob(entry) for entry in logprobs.content]
            self._raw += delta.output.outputs[0].text
        self._num_left = len(delta.events)
        return super().take(delta)

    def part(self, part: ContentEvent) -> list[Event]:
        self._num_left -= 1
        match part:
            case TextDelta(text):
                events, logprobs = self._begin("message", "msg"), self._tokens_of(text)
                self._logprobs += logprobs
                return [*events, self._piece("response.output_text.delta", text, logprobs=logprobs)]
            case ReasoningDelta(text):
                self._tokens_of(text)
                self._thoughts.append(text)
                if not self._chat.shows_thoughts:
                    return []
                return self._begin("reasoning", "rs") + [self._piece("response.reasoning_text.delta", text)]
            case ToolCallStart():
                call = {"call_id": part.id, "name": part.name, "arguments": "", **self._names.get(part.name, {})}
                return self._close_item() + self._begin("function_call", "fc", **call)
            case ToolCallDelta():
                self._tokens_of(part.arguments)
                return [self._piece("response.function_call_arguments.delta", part.arguments)]
            case ToolCallEnd():  # which one has, too, that the length cut
                return self._close_item("completed" if is_object("".join(self._pieces)) else "incomplete")

    async def close(self) -> list[Event]:
        thought_ids = await self._llm.token_ids("".join(self._thoughts), False)
        is_cut = self.finish is not None and self.finish.reason == "length"
        events = [] if self._output or is_cut else self._begin("message", "msg")
        self._logprobs += self._waiting  # of what ended it: it may have come with the last text, or after it
        events += self._close_item("incomplete" if is_cut else "completed")
        num_input, num_output, num_cached = self.turn.counts()
        self._end["usage"] = {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": num_cached or 0, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": min(len(thought_ids), num_output)},
            "total_tokens": num_input + num_output,
        }
        if is_cut:
            self._end["incomplete_details"] = {"reason": "max_output_tokens"}
            return events + self._ended("incomplete")
        self._end["completed_at"] = int(time.time())
        return events + self._ended("completed")

    def fail(self, error: ErrorInfo) -> list[Event]:
        events = self._close_item("incomplete")
        self._end["error"] = {"code": "server_error", "message": error.message}
        return events + self._ended("failed")

    def cancel(self) -> None:
        """End it as it stands."""
        self._close_item("incomplete")
        self._head["status"] = "cancelled"

    def _ended(self, status: str) -> list[Event]:
        self._head["status"] = status
        return [self._event(f"response.{status}", response=self.answer())]

    # Items.

    def _begin(self, kind: str, prefix: str, **fields: Any) -> list[Event]:
        """The item of this kind that is under way, or a new one."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close_item()
        item = {"type": kind, "id": f"{prefix}_{self._stem}{len(self._output)}", "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._open, self._pieces, self._logprobs = item, [], []
        self._output.append(dict(item))
        events.append(self._event("response.output_item.added", output_index=self._place, item=dict(item)))
        if "content" in item:
            where, part = _where(item, self._place), _part(kind, "", [])
            events.append(self._event("response.content_part.added", **where, part=part))
        return events

    def _close_item(self, status: str = "completed") -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        text, item["status"] = "".join(self._pieces), status
        where = _where(item, self._place)
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", **where, name=item["name"], arguments=text)]
        else:
            item["content"] = [part := _part(item["type"], text, self._logprobs)]
            shown = {key: part[key] for key in ("text", "logprobs") if key in part}
            events = [self._event(f"response.{part['type']}.done", **where, **shown)]
            events.append(self._event("response.content_part.done", **where, part=part))
        self._output[-1] = item
        return [*events, self._event("response.output_item.done", output_index=self._place, item=item)]

    def _tokens_of(self, text: str) -> list[dict[str, Any]]:
        """The waiting tokens of a part's text. Those of what stands before it, as a tag, wait no more."""
        # Where it is not told as it came, so many characters.
        start = self._raw.find(text) if self._num_left else self._raw.rfind(text)
        stop = start + len(text)
        own, end = list[dict[str, Any]](), 0
        while self._waiting and end < stop:
            token = self._waiting[0]["token"]
            # Nearby: bytes of a character stand in the text as the one that they make together, or not yet.
            found = self._raw.find(token, end, end + len(token) + _NEAR)
            if found >= stop:
                break
            begin, end = end, end if found < 0 else found + len(token)
            own += [self._waiting.pop(0)] * (begin >= start or end > start)
        self._raw = self._raw[stop:]
        return own

    def _piece(self, name: str, text: str, **fields: Any) -> Event:
        assert self._open is not None, "a piece belongs to an item"
        self._pieces.append(text)
        return self._event(name, **_where(self._open, self._place), delta=text, **fields)

    @property
    def _place(self) -> int:
        return len(self._output) - 1

    def _event(self, kind: str, /, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}


def _where(item: dict[str, Any], place: int) -> dict[str, Any]:
    """What an event of a part of an item says of its place."""
    return {"item_id": item["id"], "output_index": place} | ({"content_index": 0} if "content" in item else {})


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    """With bytes for every token, which the API has no null for."""
    top = [{"token": t.token, "logprob": t.logprob, "bytes": t.bytes or []} for t in entry.top_logprobs]
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes or [], "top_logprobs": top}
