"""From what a user passes to what the engine takes: a prompt in any form becomes a validated `NewRequest`.

`LLMEngine.add_request` calls it for every request, before any work is done. It knows tokenizer, model limits and
sampling rules, and nothing of the scheduler.
"""

import hashlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from quire.config.engine_args import EngineConfig
from quire.errors import InvalidRequestError
from quire.protocol.step import NewRequest
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str  # shares cached prefixes only with requests of the same salt


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: str  # only shown in the output
    cache_salt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True)
class ProcessedInput:
    """A request ready for the core, and what only its outputs need."""

    request: NewRequest
    prompt: str | None  # its text, where there is one
    params: SamplingParams  # the user's; the request's own may ask for logprobs besides, to rank sequences by

    def renamed(self, request_id: str) -> "ProcessedInput":
        """The same under another id; its random numbers stay those of the id it was made with."""
        return ProcessedInput(msgspec.structs.replace(self.request, request_id=request_id), self.prompt, self.params)


class InputProcessor:
    """Validates prompts and sampling parameters against one model."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._model = config.model
        self._tokenizer = tokenizer

    def process(
        self, request_id: str, prompt: PromptType, params: SamplingParams, arrival_time: float, priority: int = 0
    ) -> ProcessedInput:
        """Tokenize, check and resolve a request.

        Raises:
            InvalidRequestError: a bad request id, a bad prompt (form, emptiness, length, ids) or parameters that this
                model can't serve.
        """
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id must be a non-empty string, got {request_id!r}.", "request_id")
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params must be SamplingParams, got {type(params).__name__}.", "params")
        if priority and self._config.scheduler.policy != "priority":
            message = f"priority={priority} needs an engine with scheduling_policy='priority'; leave it out."
            raise InvalidRequestError(message, "priority")
        params = params.clone()  # the engine's copy: a caller may change or reuse theirs
        text, token_ids, cache_salt = self._read_prompt(prompt, params)
        limit = self._model.max_model_len
        if len(token_ids) >= limit:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens, but the maximum context length is {limit} tokens and at "
                "least one is needed for the output. Shorten the prompt, or set truncate_prompt_tokens.",
                "prompt",
                "context_length_exceeded",
            )
        params.verify_against_model(self._model.vocab_size, limit, self._config.args.max_logprobs)
        if self._tokenizer is None:
            params = self._without_text(params)
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= set(self._model.eos_token_ids)
        room = limit - len(token_ids)
        drawn = params
        if params.best_of is not None and params.best_of > params.n and params.logprobs is None:
            drawn = params.clone()
            drawn.logprobs = 0
        request = NewRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=drawn,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=stop_token_ids,
            seed=self._seed(request_id) if params.seed is None else params.seed,
            bad_words_token_ids=self._bad_words(params.bad_words),
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        return ProcessedInput(request, text, params)

    def _read_prompt(self, prompt: Any, params: SamplingParams) -> tuple[str | None, list[int], str | None]:
        text: str | None = None
        cache_salt: str | None = None
        token_ids: Any = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, dict):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown:
                raise InvalidRequestError(
                    f"unknown prompt entry {sorted(unknown)[0]!r}; a prompt dict has 'prompt' or 'prompt_token_ids', "
                    "and may have 'cache_salt'.",
                    "prompt",
                )
            text, token_ids, cache_salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
            if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
                raise InvalidRequestError(f"cache_salt must be a non-empty string, got {cache_salt!r}.", "cache_salt")
        elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray | memoryview):
            token_ids = prompt
        else:
            text = prompt  # is refused there
        token_ids = self._encode(text) if token_ids is None else self._check_token_ids(token_ids)
        return text, self._truncate(token_ids, params.truncate_prompt_tokens), cache_salt

    def _encode(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"a prompt is a string, a list of token ids, or a dict with one of them; got {type(text).__name__}.",
                "prompt",
            )
        if not text:
            raise InvalidRequestError("the prompt is empty; pass at least one character.", "prompt")
        if self._tokenizer is None:
            raise InvalidRequestError(
                "a text prompt needs a tokenizer, but skip_tokenizer_init=True; pass prompt_token_ids.", "prompt"
            )
        token_ids = self._tokenizer.encode(text)
        if not token_ids:
            raise InvalidRequestError("the prompt has no tokens once encoded; pass some text.", "prompt")
        size = self._model.vocab_size
        if (largest := max(token_ids)) >= size:
            raise InvalidRequestError(
                f"the text holds the token {self._tokenizer.convert_ids_to_tokens(largest)!r} (id {largest}), which is "
                f"out of the model's vocabulary, 0 to {size - 1}. Drop it from the text, or use a tokenizer made for "
                "this model.",
                "prompt",
            )
        return token_ids

    def _check_token_ids(self, token_ids: Any) -> list[int]:
        if isinstance(token_ids, str | bytes | bytearray | memoryview) or not isinstance(token_ids, Iterable):
            message = f"prompt_token_ids must be a list of ints, got {type(token_ids).__name__}."
            raise InvalidRequestError(message, "prompt")
        ids = list(token_ids)
        if set(map(type, ids)) != {int}:  # as a list from JSON or from a tokenizer is, without a look at each
            ids = [_token_id(value, place) for place, value in enumerate(ids)]
        if not ids:
            raise InvalidRequestError("the prompt is empty; pass at least one token id.", "prompt")
        size = self._model.vocab_size
        for wrong in (min(ids), max(ids)):
            if not 0 <= wrong < size:
                raise InvalidRequestError(
                    f"token id {wrong} (place {ids.index(wrong)}) is out of the vocabulary, 0 to {size - 1}.", "prompt"
                )
        return ids

    def _truncate(self, token_ids: list[int], keep: int | None) -> list[int]:
        if keep is None:
            return token_ids
        limit = self._model.max_model_len
        if keep == 0:
            message = "truncate_prompt_tokens=0 leaves nothing of the prompt."
            raise InvalidRequestError(message, "truncate_prompt_tokens")
        if keep > limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens={keep} is over the maximum context length of {limit} tokens.",
                "truncate_prompt_tokens",
            )
        # -1 keeps as much as the context allows, with room for one output token.
        return token_ids[-(keep if keep > 0 else limit - 1) :]

    def _without_text(self, params: SamplingParams) -> SamplingParams:
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise InvalidRequestError(f"{name} needs a tokenizer, but skip_tokenizer_init=True.", name)
        params = params.clone()
        params.detokenize = False
        return params

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Each word's token ids, as it stands after nothing and after a space."""
        found: list[list[int]] = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                assert self._tokenizer is not None, "bad_words without a tokenizer was refused above"
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found

    def _seed(self, request_id: str) -> int:
        """A seed for a request without one: the same for the same engine seed and request id, in every run."""
        key = f"{self._config.args.seed}:{request_id}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _token_id(value: Any, place: int) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise InvalidRequestError(f"token id {place} is {repr(value)[:80]}; ids must be integers.", "prompt")
