"""The dialect of /v1/completions: prompts as text or token ids, one or many; echoes and logprobs as OpenAI had them.

`TurnService` calls it. What it writes is OpenAI's, with vLLM's additions (`responses`).
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from operator import add
from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import astuple

from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.server import responses
from quire.entrypoints.server.completion_request import CompletionRequest, OtherCompletion
from quire.entrypoints.server.dialects.through_chat import validated
from quire.entrypoints.server.responses import CompletionLogprobs, Head, Usage, bounded, bounded_entries, token_name
from quire.entrypoints.server.sampling import check_size, completion_params, prepared_prompt, terms_of
from quire.entrypoints.server.service import Asked, TurnRequest
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.structure import held_to, names_of
from quire.entrypoints.server.timings import timings_of
from quire.entrypoints.server.turn import Delta, Rules, Turn, text_of
from quire.errors import InvalidRequestError
from quire.inputs import PreparedPrompt
from quire.outputs import Logprob, RequestOutput
from quire.text.tokenizer import Tokenizer

_LONG = 2000  # tokens; to decode more, or to write the logprobs of more, is for a thread


async def read_completion(state: ServerState, body: CompletionRequest, request_id: str) -> Asked["CompletionWriter"]:
    """See `Read`."""
    request_id = body.request_id or request_id
    adapter = state.adapters.get(model := state.admit(body))  # now: it may be unloaded while this is read
    if body.echo and state.llm.tokenizer is None:
        raise InvalidRequestError("echo needs a tokenizer, but this server runs without one.", "echo")
    params = held_to(completion_params(body, state.llm), state.args.structure)
    state.llm.check_room(len(body.prompt))
    prompts: list[PreparedPrompt] = []
    echoes: list[str] = []
    for prompt in body.prompt:
        prompts.append(await prepared_prompt(state.llm, prompt, params, body))
        echoes.append(await _echo(state.llm, prompts[-1], body) if body.echo else "")
        await asyncio.sleep(0)  # many short prompts take long together
    lengths = [len(prompt.token_ids) for prompt in prompts]
    check_size(body, params, lengths, state)
    as_ids = body.shows_token_ids(state.args.return_tokens_as_token_ids)
    body.force_usage(state.args.enable_force_include_usage)
    rules = Rules(
        every_token=body.logprobs is not None or bool(body.return_token_ids) or body.wants_running_usage,
        at_once=bool(body.echo),
        no_tokens=body.max_tokens == 0,
        cached_tokens=state.args.enable_prompt_tokens_details,
    )
    turn = Turn(len(prompts), params.n, rules)
    head = (f"cmpl-{request_id}", int(time.time()), model)
    writer = CompletionWriter(body, head, turn, state.llm.tokenizer, as_ids, echoes)
    writer.opens_large = bool(body.echo) and body.logprobs is not None and sum(lengths) * params.n > _LONG
    return TurnRequest(request_id, prompts, params, terms_of(body, state.llm), adapter, names_of(body)), writer


async def read_other_completion(
    state: ServerState, fields: dict[str, Any], limit: int | None, request_id: str
) -> Asked["CompletionWriter"]:
    """See `Read`: the completion request of these fields, of another API, and this limit of its output; None: none."""
    body = validated(OtherCompletion, fields | {"max_tokens": -1 if limit is None else limit})
    return await read_completion(state, body, request_id)


class CompletionWriter:
    """Writes one request's answer. See `Writer`."""

    def __init__(
        self,
        body: CompletionRequest,
        head: Head,
        turn: Turn,
        tokenizer: Tokenizer | None,
        as_ids: bool,
        echoes: list[str],
    ) -> None:
        self.turn = turn
        self.ends_with_usage = body.wants_final_usage
        self.opens_large = False
        self._body, self._head = body, head
        self._running_usage = body.wants_running_usage
        self._tokenizer, self._as_ids, self._echoes = tokenizer, as_ids, echoes
        self._offsets: dict[int, int] = {}  # choice -> characters of its text before the next token
        # Once for all choices of a prompt.
        self._echoed: dict[int, tuple[CompletionLogprobs, int]] = {}
        self._prompt_logprobs: dict[int, responses.PromptLogprobs] = {}

    def chunk(self, delta: Delta) -> Struct:
        usage = Usage.of(self.turn) if self._running_usage else None if self.ends_with_usage else UNSET
        timings = timings_of(self.turn, self._body.timings)
        return responses.CompletionResponse(*self._head, [self._piece(delta)], usage, timings=timings)

    def usage_chunk(self) -> Struct:
        return responses.CompletionResponse(*self._head, [], Usage.of(self.turn))

    def answer(self, choices: list[Any], output: RequestOutput) -> Struct:
        usage, timings = Usage.of(self.turn), timings_of(self.turn, self._body.timings)
        return responses.CompletionResponse(*self._head, choices, usage, responses.SYSTEM_FINGERPRINT, timings=timings)

    def choice(self, delta: Delta) -> responses.CompletionChoice:
        choice = self._piece(delta)
        for name in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
            if getattr(choice, name) is UNSET:
                setattr(choice, name, None)
        return choice

    def _piece(self, delta: Delta) -> responses.CompletionChoice:
        body, text, finish = self._body, text_of(delta.events), delta.finish
        choice = responses.CompletionChoice(delta.index, text)
        if finish is not None:
            choice.finish_reason, choice.stop_reason = finish.reason, finish.stop_reason
        if body.logprobs is not None:
            choice.logprobs = self._logprobs_of(delta)
        if delta.begins and body.echo:
            choice.text = self._echoes[delta.place] + text
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
            choice.prompt_token_ids = delta.output.prompt_token_ids if delta.begins else UNSET
        if body.prompt_logprobs is not None:
            if delta.place not in self._prompt_logprobs:
                self._prompt_logprobs[delta.place] = bounded_entries(delta.output.prompt_logprobs or [])
            choice.prompt_logprobs = self._prompt_logprobs[delta.place]
        return choice

    def _logprobs_of(self, delta: Delta) -> CompletionLogprobs:
        """Of the delta's tokens; of the echoed prompt's before them."""
        echoed, start, echo = None, self._offsets.get(delta.index, 0), self._echoes[delta.place]
        if delta.begins and self._body.echo:
            if delta.place not in self._echoed:
                output = delta.output
                told = self._logprobs(output.prompt_token_ids, output.prompt_logprobs or (), 0, echo)
                self._echoed[delta.place] = told
            echoed, start = self._echoed[delta.place]
        written, self._offsets[delta.index] = self._logprobs(delta.token_ids, delta.logprobs, start, echo)
        return written if echoed is None else CompletionLogprobs(*map(add, astuple(echoed), astuple(written)))

    def _logprobs(
        self, token_ids: list[int], entries: Sequence[dict[int, Logprob] | None], start: int, echo: str
    ) -> tuple[CompletionLogprobs, int]:
        """Of these tokens, and where the next one begins in the choice's text.

        Args:
            start: where the first one begins.
            echo: the part of the text that is the prompt's.
        """
        result, offset = CompletionLogprobs(), start
        for token_id, entry in zip(token_ids, entries, strict=True):
            chosen = entry[token_id] if entry is not None else None
            text = chosen.decoded_token if chosen is not None else self._decode(token_id)
            name = token_name(token_id, text, self._as_ids)
            result.text_offset.append(offset)
            result.tokens.append(name)
            result.token_logprobs.append(bounded(chosen.logprob) if chosen is not None else None)
            result.top_logprobs.append(self._top(token_id, name, entry) if entry is not None else None)
            offset += self._shown_length(token_id, text or "", offset, echo)
        return result, offset

    def _shown_length(self, token_id: int, text: str, offset: int, echo: str) -> int:
        """Characters of the choice's text that are a token's; special tokens are not always part of it."""
        if self._tokenizer is None or self._tokenizer.token_text(token_id, skip_special_tokens=True):
            return len(text)
        if offset < len(echo):
            return len(text) if echo.startswith(text, offset) else 0
        return 0 if self._body.skip_special_tokens is not False else len(text)

    def _top(self, token_id: int, name: str, entry: dict[int, Logprob]) -> dict[str, float]:
        """By token text. Of two tokens of one text the later goes by its id, and the chosen one comes first."""
        top = {name: bounded(entry[token_id].logprob)}
        for other_id, other in entry.items():
            if other_id != token_id:
                other_name = token_name(other_id, other.decoded_token, self._as_ids)
                top[token_name(other_id, None, True) if other_name in top else other_name] = bounded(other.logprob)
        return top

    def _decode(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)


async def _echo(llm: AsyncLLM, prompt: PreparedPrompt, body: CompletionRequest) -> str:
    """The prompt's text: as it was given, where it is not cut."""
    assert llm.tokenizer is not None, "echo without a tokenizer was refused"
    if prompt.text is not None and not body.truncate_prompt_tokens:
        return prompt.text
    decode = partial(llm.tokenizer.decode, prompt.token_ids, body.skip_special_tokens is not False)
    return decode() if len(prompt.token_ids) <= _LONG else await asyncio.to_thread(decode)
