"""/v1/completions: prompts as text or token ids, one or many, answered at once or as a stream.

The route, and `quire run-batch`, call `CompletionService`. A whole answer and a stream are written by the same
`_Answer`, which takes outputs whole or in pieces, so that they agree. Knows the engine by `AsyncLLM` only.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import lru_cache

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from quire.engine.async_llm import AsyncLLM
from quire.engine.input_processor import TokensPrompt
from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.responses import (
    SYSTEM_FINGERPRINT,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Usage,
    bounded,
    bounded_entries,
    check_ending,
    token_name,
)
from quire.entrypoints.server.sampling import completion_params, fitted_prompt, seeded
from quire.entrypoints.server.sse import CONTENT_TYPES, DONE, event, respond
from quire.entrypoints.server.state import ServerState, get_state
from quire.errors import InvalidRequestError
from quire.outputs import CompletionOutput, Logprob, RequestOutput
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)

_LONG = 2000  # tokens; to decode more is for a thread
_STARTED_TOGETHER = 16  # requests begun before the event loop gets a turn

_Batch = list[tuple[int, RequestOutput]]  # (place of the prompt, output)


@router.post("/v1/completions", tags=["completions"], responses=CONTENT_TYPES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Go on with one or more prompts."""
    return await respond(request, CompletionService(get_state(request)), body)


class CompletionService:
    """Answers completion requests, over HTTP or not."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._llm = state.llm

    async def create(self, body: CompletionRequest, request_id: str) -> CompletionResponse:
        """The whole answer.

        Raises:
            InvalidRequestError: the request is refused (ModelNotFoundError is one of these).
            OverloadedError, RequestFailedError, EngineDeadError: as `AsyncLLM.generate` does; where one of several
                prompts fails, all end.
        """
        answer, params, prompts = await self._begin(body, request_id)
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(self._run(answer.request_id, params, prompts, body.priority)) as batches:
            async for batch in batches:
                outputs.update(batch)
        if params.logprobs is None and params.prompt_logprobs is None:
            return answer.whole(outputs)
        return await asyncio.to_thread(answer.whole, outputs)  # many entries for each token take long

    async def stream(self, body: CompletionRequest, request_id: str) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, [DONE] included; what one engine step brings is one item. See `create`."""
        answer, params, prompts = await self._begin(body, request_id)
        async with aclosing(self._run(answer.request_id, params, prompts, body.priority)) as batches:
            async for batch in batches:
                events = [answer.chunk(choice) for place, output in batch for choice in answer.take(place, output)]
                if answer.num_unfinished == 0:
                    yield b"".join([*events, answer.ending()])
                    return
                if events:
                    yield b"".join(events)

    async def _begin(
        self, body: CompletionRequest, request_id: str
    ) -> "tuple[_Answer, SamplingParams, list[TokensPrompt]]":
        """Check everything before anything is queued."""
        request_id = body.request_id or request_id
        self._state.unknown_fields.note(body)
        model = self._state.check_model(body.model)
        if body.echo and self._llm.tokenizer is None:
            raise InvalidRequestError("echo needs a tokenizer, but this server runs without one.", "echo")
        params = completion_params(body, self._llm)
        self._llm.check_room(len(body.prompt))
        prompts: list[TokensPrompt] = []
        echoes: list[str] = []
        for prompt in body.prompt:
            prompts.append(await fitted_prompt(self._llm, prompt, body))
            echoes.append(await _echo(self._llm, prompts[-1], body) if body.echo else "")
            await asyncio.sleep(0)  # many short prompts take long together
        as_ids = body.shows_token_ids(self._state.args.return_tokens_as_token_ids)
        choices = [
            _Choice(place * params.n + index, body, self._llm.tokenizer, as_ids, echo)
            for place, echo in enumerate(echoes)
            for index in range(params.n)
        ]
        return _Answer(request_id, model, body, choices, params.n), params, prompts

    def _run(
        self, request_id: str, params: SamplingParams, prompts: list[TokensPrompt], priority: int | None
    ) -> AsyncGenerator[_Batch, None]:
        ids = [f"{request_id}-{place}" for place in range(len(prompts))] if len(prompts) > 1 else [request_id]
        generate = self._llm.generate
        return _merged(
            [
                generate(prompt, seeded(params), id, priority=priority or 0)
                for prompt, id in zip(prompts, ids, strict=True)
            ]
        )


class _Choice:
    """One choice as it comes."""

    def __init__(
        self, index: int, body: CompletionRequest, tokenizer: Tokenizer | None, as_ids: bool, echo: str
    ) -> None:
        self._index, self._body, self._tokenizer, self._as_ids, self._echo = index, body, tokenizer, as_ids, echo
        # Does a piece without text tell anything?
        self._telling = body.logprobs is not None or body.return_token_ids or body.wants_running_usage
        self._begun = False
        self._offset = 0  # characters of the choice's text before the next token
        self.num_tokens = 0
        self.finished = False

    def write(self, output: RequestOutput, part: CompletionOutput) -> CompletionChoice | None:
        """The next piece, or all of it; None where there is nothing to tell yet."""
        body, first = self._body, not self._begun
        check_ending(part)
        if body.max_tokens == 0:  # the engine had to draw one
            part = CompletionOutput(part.index, "", [], logprobs=[], finish_reason="length")
        text, token_ids = part.text, part.token_ids
        self.finished = part.finish_reason is not None
        self.num_tokens += len(token_ids)
        echoes = first and body.echo
        if not (text or self.finished or self._telling or echoes):
            return None
        self._begun = True
        choice = CompletionChoice(self._index, text, finish_reason=part.finish_reason, stop_reason=part.stop_reason)
        if body.logprobs is not None:
            choice.logprobs = self._logprobs(token_ids, part.logprobs or [], output if echoes else None)
        if echoes:
            choice.text = self._echo + text
        if body.return_token_ids:
            choice.token_ids = token_ids
            choice.prompt_token_ids = output.prompt_token_ids if first else UNSET
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = bounded_entries(output.prompt_logprobs or [])
        return choice

    def _logprobs(
        self, token_ids: list[int], entries: Sequence[dict[int, Logprob] | None], prompt: RequestOutput | None
    ) -> CompletionLogprobs:
        """Of these tokens; of those of the prompt before them, if it is given."""
        if prompt is not None:
            token_ids = prompt.prompt_token_ids + token_ids
            entries = [*(prompt.prompt_logprobs or []), *entries]
        result = CompletionLogprobs()
        for token_id, entry in zip(token_ids, entries, strict=True):
            chosen = entry[token_id] if entry is not None else None
            text = chosen.decoded_token if chosen is not None else self._decode(token_id)
            name = token_name(token_id, text, self._as_ids)
            result.text_offset.append(self._offset)
            result.tokens.append(name)
            result.token_logprobs.append(bounded(chosen.logprob) if chosen is not None else None)
            result.top_logprobs.append(self._top(token_id, name, entry) if entry is not None else None)
            self._offset += self._shown_length(token_id, text or "")
        return result

    def _shown_length(self, token_id: int, text: str) -> int:
        """Characters of the choice's text that are a token's; special tokens are not always part of it."""
        if self._tokenizer is None or not _is_special(self._tokenizer, token_id):
            return len(text)
        if self._offset < len(self._echo):
            return len(text) if self._echo.startswith(text, self._offset) else 0
        return len(text) if self._body.skip_special_tokens is False else 0

    def _top(self, token_id: int, name: str, entry: dict[int, Logprob]) -> dict[str, float]:
        """By token text. Of two tokens of one text the later goes by its id, and the chosen one comes first."""
        top = {name: bounded(entry[token_id].logprob)}
        for other_id, other in entry.items():
            if other_id != token_id:
                other_name = token_name(other_id, other.decoded_token, self._as_ids)
                top[token_name(other_id, None, True) if other_name in top else other_name] = bounded(other.logprob)
        return top

    def _decode(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)


class _Answer:
    """A request's answer in the making: all its choices, `num_choices` for each prompt, and its usage."""

    def __init__(
        self, request_id: str, model: str, body: CompletionRequest, choices: list[_Choice], num_choices: int
    ) -> None:
        self.request_id = request_id
        self.num_unfinished = len(choices)
        self._head = (f"cmpl-{request_id}", int(time.time()), model)
        self._choices, self._num_choices = choices, num_choices
        self._outputs: dict[int, RequestOutput] = {}  # place of the prompt -> its latest output
        self._final_usage = body.wants_final_usage
        self._running_usage = body.wants_running_usage

    def take(self, place: int, output: RequestOutput) -> list[CompletionChoice]:
        """What is new, or all there is, of one prompt's choices."""
        self._outputs[place] = output
        news: list[CompletionChoice] = []
        for part in output.outputs:
            choice = self._choices[place * self._num_choices + part.index]
            if choice.finished:  # a request's last output has all its sequences once more
                continue
            if (new := choice.write(output, part)) is not None:
                news.append(new)
            self.num_unfinished -= choice.finished
        return news

    def whole(self, outputs: dict[int, RequestOutput]) -> CompletionResponse:
        """The response of a request that is not streamed."""
        choices = [choice for place in sorted(outputs) for choice in self.take(place, outputs[place])]
        return CompletionResponse(*self._head, choices, self._usage(), SYSTEM_FINGERPRINT)

    def chunk(self, choice: CompletionChoice) -> bytes:
        """The event of a piece of a choice."""
        usage = self._usage() if self._running_usage else None if self._final_usage else UNSET
        return event(CompletionResponse(*self._head, [choice], usage))

    def ending(self) -> bytes:
        """The last events."""
        return event(CompletionResponse(*self._head, [], self._usage())) + DONE if self._final_usage else DONE

    def _usage(self) -> Usage:
        outputs = self._outputs.values()
        return Usage.of(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(choice.num_tokens for choice in self._choices),
            sum(output.num_cached_tokens or 0 for output in outputs),
        )


@lru_cache(maxsize=1 << 16)
def _is_special(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether decoding may leave the token out."""
    return not tokenizer.decode([token_id])


async def _echo(llm: AsyncLLM, prompt: TokensPrompt, body: CompletionRequest) -> str:
    """The prompt's text: as it was given, where it is not cut."""
    assert llm.tokenizer is not None, "echo without a tokenizer was refused"
    if "prompt" in prompt and not body.truncate_prompt_tokens:
        return prompt["prompt"]
    token_ids, skip = prompt.get("prompt_token_ids", []), body.skip_special_tokens is not False
    if len(token_ids) <= _LONG:
        return llm.tokenizer.decode(token_ids, skip)
    return await asyncio.to_thread(llm.tokenizer.decode, token_ids, skip)


async def _merged(sources: list[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[_Batch, None]:
    """Outputs of several requests as they come, those of one step together. Leaving it, or a failure, ends them all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as outputs:
            async for output in outputs:
                yield [(0, output)]
        return
    waiting: dict[asyncio.Task[RequestOutput | None], int] = {}
    fresh = list(range(len(sources)))  # places whose next output nobody awaits
    try:
        while waiting or fresh:
            for count, place in enumerate(fresh, 1):
                waiting[asyncio.create_task(_next(sources[place]))] = place
                if count % _STARTED_TOGETHER == 0:
                    await asyncio.sleep(0)
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for error in [task.exception() for task in done]:
                if error is not None:
                    raise error
            batch = [(place, task.result()) for task, place in waiting.items() if task in done]
            batch.sort(key=lambda item: item[0])
            for task in done:
                del waiting[task]
            fresh = [place for place, output in batch if output is not None]
            yield [(place, output) for place, output in batch if output is not None]
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(source, None)
