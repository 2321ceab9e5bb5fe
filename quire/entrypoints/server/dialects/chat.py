"""The dialect of /v1/chat/completions: a conversation, which the chat template writes as a prompt.

`TurnService` calls it. What it writes is OpenAI's, with vLLM's additions (`responses`).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET, Struct

from quire.entrypoints.server import responses
from quire.entrypoints.server.chat_request import ChatBatchRequest, ChatCompletionRequest
from quire.entrypoints.server.parsers.base import ContentEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from quire.entrypoints.server.parsing import NoFormatError, Parsing, plan_parsing
from quire.entrypoints.server.prompts import conversation_text, template_of
from quire.entrypoints.server.requests_common import content_text
from quire.entrypoints.server.responses import CalledFunction, Head, Usage, bounded, bounded_entries, token_name
from quire.entrypoints.server.sampling import chat_params, check_size, named, prepared_prompt, terms_of
from quire.entrypoints.server.service import Asked, TurnRequest
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.structure import held_to, names_of
from quire.entrypoints.server.timings import timings_of
from quire.entrypoints.server.tool_request import read_offer
from quire.entrypoints.server.turn import Delta, Rules, Turn
from quire.entrypoints.server.unknown_fields import ignore
from quire.errors import InvalidRequestError
from quire.outputs import Logprob, RequestOutput
from quire.text.tokenizer import Tokenizer

# Variables of some templates, and the value that asks a template without them for nothing.
_VARIABLES = {"reasoning_effort": "none", "verbosity": "medium"}
_SWITCH = "enable_thinking"  # what other templates have instead of an effort


async def read_chat(
    state: ServerState, body: ChatCompletionRequest, request_id: str, sent_as: Mapping[str, str] | None = None
) -> Asked["ChatWriter"]:
    """See `Read`. Where only calls could not be understood, that is the `refusal`.

    Args:
        sent_as: what the client calls some fields, for the log.
    """
    request_id, refusal = body.request_id or request_id, None
    adapter = state.adapters.get(model := state.admit(body))  # now: it may be unloaded while this is read
    offer = read_offer(body.tools, body.tool_choice, body.parallel_tool_calls)
    params = held_to(chat_params(body, state.llm), state.args.structure)
    text = await _render(state, body)
    state.unknown_fields.note(body, sent_as)  # what is of no use to the template
    try:
        with named(names_of(body)):
            plan = state, text, params, offer, body  # in a thread: a grammar of many tools takes its time
            parsing = plan_parsing(*plan) if offer is None else await asyncio.to_thread(plan_parsing, *plan)
    except NoFormatError as error:
        parsing, refusal = Parsing(params), error
    params = parsing.params
    prompt = await prepared_prompt(state.llm, text, params, body)
    check_size(body, params, [len(prompt.token_ids)], state)
    args = state.args
    body.force_usage(args.enable_force_include_usage)
    rules = Rules(
        every_token=bool(body.logprobs or body.return_token_ids or body.wants_running_usage),
        cached_tokens=args.enable_prompt_tokens_details,
    )
    turn = Turn(1, params.n, rules, parsing.make_parser)
    head = (f"chatcmpl-{request_id}", int(time.time()), model)
    role = args.response_role if _opens_turn(body) else body.messages[-1].role
    writer = ChatWriter(body, head, turn, role, body.shows_token_ids(args.return_tokens_as_token_ids))
    writer.tokenizer = state.llm.tokenizer
    names = names_of(body) | parsing.names
    return TurnRequest(request_id, [prompt], params, terms_of(body, state.llm), adapter, names, refusal), writer


async def read_chats(state: ServerState, body: ChatBatchRequest, request_id: str) -> Asked["ChatWriter"]:
    """See `Read`. Each conversation has choices of its own, in the order of the conversations."""
    for name in ("echo", "prompt_logprobs"):
        if (value := getattr(body, name)) is not None and value is not False:
            raise InvalidRequestError(f"{name} goes with one conversation only: /v1/chat/completions has it.", name)
    state.llm.check_room(len(body.messages))
    each = [await read_chat(state, body.model_copy(update={"messages": one}), request_id) for one in body.messages]
    (request, writer), prompts = each[0], [read.prompts[0] for read, _ in each]
    check_size(body, request.params, [len(prompt.token_ids) for prompt in prompts], state)
    writer.turn.join([other.turn for _, other in each[1:]])
    return replace(request, prompts=prompts), writer


async def _render(state: ServerState, body: ChatCompletionRequest) -> str:
    template, args = template_of(state, body.chat_template, body.tools), state.args
    for name, told in (("tools", "tools (in the prompt)"), ("documents", "documents")):
        if getattr(body, name) and name not in template:
            ignore(body, told)
    return await conversation_text(
        state,
        body.messages,
        chat_template=body.chat_template,
        tools=None if body.tool_choice == "none" and args.exclude_tools_when_tool_choice_none else body.tools,
        documents=body.documents,
        add_generation_prompt=_opens_turn(body),
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=_variables(body, template, args.reasoning_effort_map or {}),
    )


def _opens_turn(body: ChatCompletionRequest) -> bool:
    """Whether the prompt opens the assistant's turn."""
    return not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt


def _variables(body: ChatCompletionRequest, template: str, efforts: dict[str, Any]) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    for name, harmless in _VARIABLES.items():
        value = getattr(body, name)
        value = efforts.get(value, value) if name == "reasoning_effort" else value
        if value is not None and name in template:
            variables[name] = value
        elif value is not None and name == "reasoning_effort" and _SWITCH in template:
            variables.setdefault(_SWITCH, value != "none")
        elif value not in (None, harmless):
            ignore(body, name)
    return variables


class ChatWriter:
    """Writes one request's answer. See `Writer`."""

    opens_large = False
    tokenizer: Tokenizer | None = None  # for logprobs

    def __init__(self, body: ChatCompletionRequest, head: Head, turn: Turn, role: str, as_ids: bool) -> None:
        self.turn = turn
        self.ends_with_usage = body.wants_final_usage
        self._body, self._head = body, head
        self._role, self._as_ids = role, as_ids
        self._running_usage, self.shows_thoughts = body.wants_running_usage, body.include_reasoning is not False
        last = body.messages[-1]
        self._echo = content_text(last.content) if body.echo and last.role == self._role else ""

    def chunk(self, delta: Delta) -> Struct:
        finish, content = delta.finish, _delta_of(delta.events, self.shows_thoughts)
        if delta.begins:
            content.role = self._role
            content.content = self._echo or None if content.content is UNSET else self._echo + (content.content or "")
        elif finish is not None and finish.reason == "tool_calls" and not content.content:
            content.content = UNSET  # null to the end
        choice = responses.ChatChunkChoice(delta.index, content, self.logprobs(delta))
        if finish is not None:
            choice.finish_reason, choice.stop_reason = finish.reason, finish.stop_reason
        usage = Usage.of(self.turn) if self._running_usage else None if self.ends_with_usage else UNSET
        chunk = responses.ChatChunk(*self._head, [choice], usage, timings=timings_of(self.turn, self._body.timings))
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
            chunk.prompt_token_ids = delta.output.prompt_token_ids if delta.begins else UNSET
        return chunk

    def usage_chunk(self) -> Struct:
        return responses.ChatChunk(*self._head, [], Usage.of(self.turn))

    def choice(self, delta: Delta) -> responses.ChatChoice:
        shown = _delta_of(delta.events, self.shows_thoughts)
        message, finish = _message_of(shown, self._role, self._echo), delta.finish
        assert finish is not None, "a whole choice has finished"
        choice = responses.ChatChoice(delta.index, message, self.logprobs(delta), finish.reason, finish.stop_reason)
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def answer(self, choices: list[Any], output: RequestOutput) -> Struct:
        usage, timings = Usage.of(self.turn), timings_of(self.turn, self._body.timings)
        response = responses.ChatResponse(*self._head, choices, usage, timings=timings)
        if self._body.return_token_ids and len(self.turn.outputs) == 1:
            response.prompt_token_ids = output.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            response.prompt_logprobs = bounded_entries(output.prompt_logprobs or [])
        return response

    def logprobs(self, delta: Delta) -> responses.ChatLogprobs | None:
        """Of the delta's tokens, where they were asked for."""
        if not self._body.logprobs:
            return None
        return responses.ChatLogprobs(token_logprobs(delta, self._body.top_logprobs or 0, self._as_ids, self.tokenizer))


def token_logprobs(
    delta: Delta, num_top: int, as_ids: bool = False, tokenizer: Tokenizer | None = None
) -> list[responses.TokenLogprob]:
    """Those of a delta's tokens, with the likeliest in the place of each; -1: all that there are."""

    def named(token_id: int, entry: Logprob) -> responses.TopLogprob:
        given, name = token_bytes(token_id, entry, tokenizer), token_name(token_id, entry.decoded_token, as_ids)
        return responses.TopLogprob(name, bounded(entry.logprob), given)

    content: list[responses.TokenLogprob] = []
    for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True):
        assert entry is not None, "only a prompt's first token has none"
        likeliest = sorted(entry.items(), key=lambda item: -item[1].logprob)[: None if num_top == -1 else num_top]
        chosen, top = named(token_id, entry[token_id]), [named(*each) for each in likeliest]
        content.append(responses.TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return content


def token_bytes(token_id: int, entry: Logprob, tokenizer: Tokenizer | None) -> list[int] | None:
    """A token's own bytes: in its text a replacement character stands for some that are no text by themselves."""
    if (text := entry.decoded_token) is not None and "\ufffd" not in text:
        return list(text.encode())
    return None if tokenizer is None else tokenizer.bytes_of(token_id)


def _delta_of(events: Sequence[ContentEvent], thoughts: bool) -> responses.ChatDelta:
    """One chunk's news: text, thoughts, and for each call that it touches one entry."""
    if not events:
        return responses.ChatDelta("")
    delta, pieces = responses.ChatDelta(), dict[int, responses.ToolCallPiece]()
    for event in events:
        match event:
            case TextDelta(text):
                delta.content = (delta.content or "") + text
            case ReasoningDelta(text) if thoughts:
                delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + text
            case ToolCallStart(number, id, name):
                pieces[number] = responses.ToolCallPiece(number, id, "function", CalledFunction(name))
            case ToolCallDelta(number, arguments):
                piece = pieces.setdefault(number, responses.ToolCallPiece(number, function=CalledFunction()))
                assert piece.function, "made so"
                piece.function.arguments += arguments
    if pieces:
        delta.tool_calls = list(pieces.values())
    return delta


def _message_of(delta: responses.ChatDelta, role: str, echo: str) -> responses.ChatMessage:
    message = responses.ChatMessage(role, None if delta.content is UNSET and not echo else echo + (delta.content or ""))
    if delta.reasoning:
        message.reasoning = message.reasoning_content = delta.reasoning
    if delta.tool_calls:
        message.content = message.content or None
        message.tool_calls = [
            responses.ToolCall(str(call.id), call.function or CalledFunction()) for call in delta.tool_calls
        ]
    return message
