"""The dialect of /completion: llama.cpp's names in, its objects and its chunks out.

`EventService` calls it. The body is read as a completion's.
"""

import asyncio
from typing import Any

import msgspec
from msgspec import UNSET

from quire.entrypoints.server.dialects.chat import token_bytes
from quire.entrypoints.server.dialects.completions import read_other_completion
from quire.entrypoints.server.dialects.through_chat import renamed, within_context
from quire.entrypoints.server.errors import ErrorInfo
from quire.entrypoints.server.event_service import Event, EventWriter
from quire.entrypoints.server.llama_requests import LlamaCompletionRequest, prompts_of
from quire.entrypoints.server.requests_common import wrong
from quire.entrypoints.server.responses import bounded
from quire.entrypoints.server.service import Asked, TurnRequest
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.timings import timings_of
from quire.entrypoints.server.turn import Delta, Turn, text_of
from quire.outputs import Logprob

# Completions' fields -> those of the body, where they differ.
_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}
_SAME = ("logit_bias", "ignore_eos", "json_schema", "grammar", "stream", "model")


async def read_llama(state: ServerState, body: LlamaCompletionRequest, request_id: str) -> Asked["LlamaWriter"]:
    """See `Read`."""
    state.unknown_fields.note(body)
    fields = body.openai_fields() | {name: getattr(body, name) for name in _SAME}
    if body.n_predict == 0:
        raise wrong("n_predict", "at least 1, or -1 for no limit", 0)
    limit = -1 if body.n_predict is None else max(-1, body.n_predict)
    prompts: list[Any] = prompts_of(body.prompt)
    if not all(isinstance(prompt, str) for prompt in prompts):  # then all as tokens
        prompts = await asyncio.gather(*(tokens_of(state, prompt) for prompt in prompts))
    fields |= {"prompt": prompts, "logprobs": body.n_probs or None, "return_token_ids": body.return_tokens}
    with renamed(_NAMES):
        turn, writer = await within_context(
            lambda limit: read_other_completion(state, fields, limit, request_id), limit, "max_tokens"
        )
    return turn, LlamaWriter(state, body, writer.turn, turn)


async def tokens_of(state: ServerState, prompt: str | list[int | str]) -> list[int]:
    """Tokens and texts in turn as tokens; only what begins the prompt gets what begins prompts."""
    ids: list[int] = []
    for place, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
        ids += [part] if isinstance(part, int) else await state.llm.token_ids(part, place == 0)
        if len(ids) > state.llm.config.model.max_model_len:
            break  # it is refused, however much longer it is
    return ids


class LlamaWriter(EventWriter):
    """Writes one request's answer, of one prompt or several. See `EventWriter`."""

    def __init__(self, state: ServerState, body: LlamaCompletionRequest, turn: Turn, request: TurnRequest) -> None:
        self.turn, self._tokenizer = turn, state.llm.tokenizer
        self._body, self._model, self._request = body, state.check_model(body.model), request
        self._answers: list[dict[str, Any]] = [
            {"index": place, "content": "", "tokens": []} for place in range(len(request.prompts))
        ]
        self._num_tokens = [0] * len(request.prompts)

    def take(self, delta: Delta) -> list[Event]:
        answer, text = self._answers[delta.place], text_of(delta.events)
        self._num_tokens[delta.place] += len(delta.token_ids)
        answer["content"] += text
        tokens = delta.token_ids if self._body.return_tokens else []
        answer["tokens"] += tokens
        evaluated = len(delta.output.prompt_token_ids)
        counts = {"tokens_predicted": self._num_tokens[delta.place], "tokens_evaluated": evaluated}
        piece = {"index": delta.place, "content": text, "tokens": tokens, "stop": False, "id_slot": -1, **counts}
        if self._body.n_probs:
            pairs = zip(delta.token_ids, delta.logprobs, strict=True)
            piece["completion_probabilities"] = odds = [self._odds(token, entry or {}) for token, entry in pairs]
            answer.setdefault("completion_probabilities", []).extend(odds)
        if delta.finish is None:
            return [piece]
        end = counts | self._end(delta)
        answer |= end
        return [piece, {"index": delta.place, "content": "", "tokens": [], **end}]

    def fail(self, error: ErrorInfo) -> list[Event]:
        return [{"error": {"code": error.status, "message": error.message, "type": error.type}}]

    def answer(self) -> Any:
        return self._answers[0] if len(self._answers) == 1 else self._answers

    def _end(self, delta: Delta) -> dict[str, Any]:
        """What is told of a choice that has ended."""
        assert delta.finish is not None
        word = delta.finish.stop_reason if isinstance(delta.finish.stop_reason, str) else ""
        kind = "limit" if delta.finish.reason == "length" else "word" if word else "eos"
        prompt, content = self._request.prompts[delta.place], self._answers[delta.place]["content"]
        params = {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(prompt.params).items()}
        told = {
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "generation_settings": params,
            "prompt": prompt.text or "",
            "has_new_line": "\n" in content,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": delta.output.num_cached_tokens or 0,
        }
        timings = timings_of(self.turn)
        return told if timings is UNSET else told | {"timings": timings}

    def _odds(self, token_id: int, entry: dict[int, Logprob]) -> dict[str, Any]:
        """A token and the likeliest ones in its place."""

        def shown(one: int) -> dict[str, Any]:
            text, given = entry[one].decoded_token or "", token_bytes(one, entry[one], self._tokenizer)
            return {"id": one, "token": text, "bytes": given, "logprob": bounded(entry[one].logprob)}

        likeliest = sorted(entry, key=lambda one: -entry[one].logprob)[: self._body.n_probs]
        return shown(token_id) | {"top_logprobs": [shown(one) for one in likeliest]}
