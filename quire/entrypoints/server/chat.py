"""/v1/chat/completions: a conversation, written as a prompt by the chat template, answered at once or as a stream.

The route, and `quire run-batch`, call `ChatService`. Knows the engine by `AsyncLLM` only, and nothing of templates but
whether one mentions a variable.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    TokenLogprob,
    TopLogprob,
    Usage,
    bounded,
    bounded_entries,
    check_ending,
    token_name,
)
from quire.entrypoints.server.sampling import chat_params, fitted_prompt, seeded
from quire.entrypoints.server.sse import CONTENT_TYPES, DONE, event, respond
from quire.entrypoints.server.state import ServerState, get_state
from quire.errors import InvalidRequestError
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.text.conversation import select_template

router = APIRouter(route_class=JsonRoute)

# Variables of some templates, and the value that asks a template without them for nothing.
_VARIABLES = {"reasoning_effort": "none", "verbosity": "medium"}


@router.post("/v1/chat/completions", tags=["chat"], responses=CONTENT_TYPES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await respond(request, ChatService(get_state(request)), body)


class ChatService:
    """Answers chat requests, over HTTP or not."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._llm = state.llm

    async def create(self, body: ChatCompletionRequest, request_id: str) -> ChatResponse:
        """The whole answer.

        Raises:
            InvalidRequestError: the request is refused (ModelNotFoundError is one of these).
            OverloadedError, RequestFailedError, EngineDeadError: as `AsyncLLM.generate` does.
        """
        answer, outputs = await self._begin(body, request_id)
        async with aclosing(outputs):
            output = await anext(outputs)
        if not body.logprobs and body.prompt_logprobs is None:
            return answer.whole(output)
        return await asyncio.to_thread(answer.whole, output)  # many entries for each token take long

    async def stream(self, body: ChatCompletionRequest, request_id: str) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, [DONE] included; what one engine step brings is one item. See `create`."""
        answer, outputs = await self._begin(body, request_id)
        async with aclosing(outputs):
            async for output in outputs:
                if data := answer.events(output):
                    yield data

    async def _begin(
        self, body: ChatCompletionRequest, request_id: str
    ) -> "tuple[_Answer, AsyncGenerator[RequestOutput, None]]":
        """Check everything before anything is queued."""
        request_id = body.request_id or request_id
        self._state.unknown_fields.note(body)
        model = self._state.check_model(body.model)
        params = chat_params(body, self._llm)
        prompt = await fitted_prompt(self._llm, await self._render(body), body)
        outputs = self._llm.generate(prompt, seeded(params), request_id, priority=body.priority or 0)
        return _Answer(request_id, model, body, self._state, params.n), outputs

    async def _render(self, body: ChatCompletionRequest) -> str:
        args, tokenizer = self._state.args, self._llm.tokenizer
        if body.chat_template is not None and not args.trust_request_chat_template:
            raise InvalidRequestError(
                "this server takes no chat_template from requests; leave it out. Its operator can allow them with "
                "--trust-request-chat-template.",
                "chat_template",
            )
        if tokenizer is None:
            raise InvalidRequestError("chat needs a tokenizer, but this server runs without one.", "messages")
        chat_template = body.chat_template if body.chat_template is not None else args.chat_template
        text = select_template(tokenizer, chat_template, body.tools)
        return await self._llm.render_chat(
            [dict(message) for message in body.messages],
            tools=body.tools,
            documents=body.documents,
            chat_template=chat_template,
            trusted=body.chat_template is None,
            add_generation_prompt=_opens_turn(body),
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=_variables(body, text),
        )


def _opens_turn(body: ChatCompletionRequest) -> bool:
    """Whether the prompt opens the assistant's turn."""
    return not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt


def _variables(body: ChatCompletionRequest, template: str) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    for name, harmless in _VARIABLES.items():
        value = getattr(body, name)
        if value is not None and name in template:
            variables[name] = value
        elif value not in (None, harmless):
            message = f"{name} is of no use: this model's chat template has no such variable; leave it out."
            raise InvalidRequestError(message, name)
    return variables


class _Choice:
    """How far a choice has come."""

    def __init__(self) -> None:
        self.begun = False
        self.finished = False
        self.num_tokens = 0


class _Answer:
    """A request's answer in the making."""

    def __init__(
        self, request_id: str, model: str, body: ChatCompletionRequest, state: ServerState, num_choices: int
    ) -> None:
        self._head = (f"chatcmpl-{request_id}", int(time.time()), model)
        self._body = body
        self._choices = [_Choice() for _ in range(num_choices)]
        self._num_unfinished = num_choices
        self._final_usage = body.wants_final_usage
        self._running_usage = body.wants_running_usage
        # Does a piece without text tell anything?
        self._telling = body.logprobs or body.return_token_ids or self._running_usage
        self._as_ids = body.shows_token_ids(state.args.return_tokens_as_token_ids)
        last = body.messages[-1]
        self._role = state.args.response_role if _opens_turn(body) else last.role
        self._echo = _text_of(last.content) if body.echo and last.role == self._role else ""

    def whole(self, output: RequestOutput) -> ChatResponse:
        """The response of a request that is not streamed."""
        body, choices = self._body, list[ChatChoice]()
        for part in output.outputs:
            check_ending(part)
            message = ChatMessage(self._role, self._echo + part.text)
            logprobs = self._logprobs(part)
            choice = ChatChoice(part.index, message, logprobs, part.finish_reason, part.stop_reason)
            if body.return_token_ids:
                choice.token_ids = part.token_ids
            self._choices[part.index].num_tokens = len(part.token_ids)
            choices.append(choice)
        response = ChatResponse(*self._head, choices, self._usage(output))
        if body.return_token_ids:
            response.prompt_token_ids = output.prompt_token_ids
        if body.prompt_logprobs is not None:
            response.prompt_logprobs = bounded_entries(output.prompt_logprobs or [])
        return response

    def events(self, output: RequestOutput) -> bytes:
        """What is new, as events; the last ones end the stream."""
        events: list[bytes] = []
        for part in output.outputs:
            choice = self._choices[part.index]
            if choice.finished:  # a request's last output has all its sequences once more
                continue
            check_ending(part)
            choice.finished = part.finish_reason is not None
            choice.num_tokens += len(part.token_ids)
            self._num_unfinished -= choice.finished
            if part.text or choice.finished or self._telling:
                events.append(event(self._chunk(output, part, first=not choice.begun)))
                choice.begun = True
        if self._num_unfinished == 0:
            if self._final_usage:
                events.append(event(ChatChunk(*self._head, [], self._usage(output))))
            events.append(DONE)
        return b"".join(events)

    def _chunk(self, output: RequestOutput, part: CompletionOutput, first: bool) -> ChatChunk:
        delta = ChatDelta(self._echo + part.text, self._role) if first else ChatDelta(part.text)
        choice = ChatChunkChoice(part.index, delta, self._logprobs(part), part.finish_reason)
        if part.finish_reason is not None:
            choice.stop_reason = part.stop_reason
        chunk = ChatChunk(*self._head, [choice])
        if self._running_usage:
            chunk.usage = self._usage(output)
        elif self._final_usage:
            chunk.usage = None
        if self._body.return_token_ids:
            choice.token_ids = part.token_ids
            chunk.prompt_token_ids = output.prompt_token_ids if first else UNSET
        return chunk

    def _usage(self, output: RequestOutput) -> Usage:
        num_tokens = sum(choice.num_tokens for choice in self._choices)
        return Usage.of(len(output.prompt_token_ids), num_tokens, output.num_cached_tokens or 0)

    def _logprobs(self, part: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        num_top = self._body.top_logprobs or 0
        num_top = None if num_top == -1 else num_top
        content: list[TokenLogprob] = []
        for token_id, entry in zip(part.token_ids, part.logprobs or [], strict=True):
            likeliest = sorted(entry.items(), key=lambda item: -item[1].logprob)[:num_top]
            chosen = self._named(token_id, entry[token_id])
            content.append(
                TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, [self._named(*e) for e in likeliest])
            )
        return ChatLogprobs(content)

    def _named(self, token_id: int, entry: Logprob) -> TopLogprob:
        text = entry.decoded_token
        # A replacement character stands for bytes that are no text by themselves.
        given = None if text is None or "\ufffd" in text else list(text.encode())
        return TopLogprob(token_name(token_id, text, self._as_ids), bounded(entry.logprob), given)


def _text_of(content: str | Sequence[str | dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part if isinstance(part, str) else part.get("text", "") for part in content)
