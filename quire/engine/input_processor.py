"""From what a user passes to what the engine takes: a prompt in any form becomes a validated `NewRequest`.

Every request comes through here, once: `prepare` proves that a prompt can be computed, before anything is queued, and
`process` makes the request. It knows tokenizer, model limits and sampling rules, and nothing of the scheduler.
"""

import copy
import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from quire.config.engine_args import EngineConfig
from quire.engine.adapters import AdapterBook
from quire.engine.terms import NO_TERMS, check_terms
from quire.errors import InvalidRequestError, require
from quire.inputs import PreparedPrompt, PromptType, bad_prompt, prompt_too_long
from quire.pooling_params import PoolingParams
from quire.protocol.requests import NewRequest, PoolingTask, SamplingTask, Terms
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer
from quire.utils.values import number

# Seconds; taken once, so that times that callers give keep their order, and times of several requests can be compared.
WALL_CLOCK_OFFSET = time.time() - time.monotonic()


@dataclass(frozen=True)
class ProcessedInput:
    """A request ready for the core, and what only its outputs need."""

    request: NewRequest
    prompt: str | None  # its text, where there is one
    params: SamplingParams  # the user's; the request's own may ask for logprobs besides, to rank sequences by

    def renamed(self, request_id: str) -> "ProcessedInput":
        """The same under another id; its random numbers stay those of the id it was made with."""
        return replace(self, request=msgspec.structs.replace(self.request, request_id=request_id))


class InputProcessor:
    """Validates prompts and sampling parameters against one model.

    Attributes:
        policy: the scheduling policy's name, as of now; what another one reads of a request's terms is refused.
        adapters: those that requests have named.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, is_engine_here: bool = True) -> None:
        """`is_engine_here`: the engine core is in this process."""
        self._config, self._model, self._tokenizer = config, config.model, tokenizer
        self._calls_functions = is_engine_here and not config.args.has_processes
        self.policy = config.scheduler.policy
        self.adapters = AdapterBook(config.args)
        self._bad_words = lru_cache(4)(self._find_bad_words)  # a request's prompts have the same

    def prepare(
        self, prompt: PromptType, params: SamplingParams | PoolingParams, add_special_tokens: bool = True
    ) -> PreparedPrompt:
        """Check parameters and prompt, and encode the prompt where it is text.

        Args:
            params: of tokens, or of a vector, for which the prompt may fill the context.
            add_special_tokens: those that the tokenizer begins or ends a text with; a chat template writes its own.

        Raises:
            InvalidRequestError: a bad prompt (form, emptiness, length, ids), or parameters that this model can't serve.
        """
        if pools := isinstance(params, PoolingParams):
            params = params.sampling_params(self._model)
        elif self._model.num_labels:
            raise InvalidRequestError(
                "this model classifies, and writes no text: see LLM.classify, /classify.", "params"
            )
        require(isinstance(params, SamplingParams), "params", params, "SamplingParams")
        params = params.clone()  # the engine's copy: a caller may change or reuse theirs
        limit = self._model.max_model_len
        params.verify_against_model(self._model.vocab_size, limit, self._config.args.max_logprobs)
        speculative = self._config.speculative
        refuses_logprobs = speculative is not None and speculative.disable_logprobs and params.speculative
        if refuses_logprobs and params.logprobs is not None:
            why = "as this engine's speculative_config has disable_logprobs; leave it out, or set speculative=False"
            raise InvalidRequestError(f"logprobs={params.logprobs} is refused, {why}.", "logprobs")
        if params.logits_processors and not self._calls_functions:
            message = "logits_processors are Python functions, which only a model in this process can call"
            remedy = 'AsyncOptions(engine="thread") and distributed_executor_backend="uni"'
            raise InvalidRequestError(f"{message}; take {remedy}.", "logits_processors")
        keep = params.truncate_prompt_tokens
        require(keep != 0, "truncate_prompt_tokens", keep, "-1 or at least 1, as 0 leaves nothing of the prompt")
        if self._tokenizer is None:
            for name in ("stop", "bad_words", "structured_outputs"):
                if getattr(params, name):
                    raise InvalidRequestError(f"{name} needs a tokenizer, but skip_tokenizer_init=True.", name)
            params.detokenize = False
        text, token_ids, cache_salt = _read_prompt(prompt)
        token_ids = self._encode(text, params, add_special_tokens) if token_ids is None else self._checked(token_ids)
        # -1 keeps as much as the context allows, with room for one output token.
        token_ids = token_ids if keep is None else token_ids[-(keep if keep > 0 else limit - (not pools)) :]
        if len(token_ids) >= limit + pools:
            raise prompt_too_long(len(token_ids), limit, pools)
        return PreparedPrompt(token_ids, text, params, cache_salt, pools, self._bad_words(*params.bad_words))

    def process(
        self,
        request_id: str,
        prompt: PromptType | PreparedPrompt,
        params: SamplingParams | None,
        arrival_time: float | None,
        now: float,
        terms: Terms = NO_TERMS,
    ) -> ProcessedInput:
        """Prepare a prompt, unless it is already, and resolve the request.

        Args:
            params: None where the prompt is prepared, and so has its own.
            arrival_time: by the wall clock, as its caller says; `now` if None, or in the future.
            now: by the engine's clock, which is monotonic, as the request's own time is.

        Raises:
            InvalidRequestError: a bad request id, or bad terms; or as `prepare` does.
        """
        require(isinstance(request_id, str) and request_id != "", "request_id", request_id, "a non-empty string")
        came = number(0.0 if arrival_time is None else arrival_time, float)
        require(came is not None and abs(came) < 1e15, "arrival_time", arrival_time, "seconds of a clock")
        arrival = now if arrival_time is None else min(now, came - WALL_CLOCK_OFFSET)  # type: ignore[operator]
        check_terms(terms, self.policy)
        if not isinstance(prompt, PreparedPrompt):
            prompt = self.prepare(prompt, params)  # type: ignore[arg-type]  (None is refused there)
        elif params is not None:
            raise InvalidRequestError("a prepared prompt has its parameters already; pass none.", "params")
        params = drawn = prompt.params
        # A grammar's end is one, whatever is ignored.
        ends = not params.ignore_eos or params.structured_outputs is not None
        eos_token_ids = self._model.eos_token_ids if ends else ()
        token_ids = [0] * (terms.adapter.num_virtual if terms.adapter else 0) + prompt.token_ids
        room = self._model.max_model_len + prompt.pools - len(token_ids)
        if room < 1:
            raise prompt_too_long(len(token_ids), self._model.max_model_len)
        ranked = params.best_of is not None and params.best_of > params.n and not params.use_beam_search
        if ranked and params.logprobs is None:
            drawn = copy.copy(params)
            drawn.logprobs = 0
        task = (PoolingTask if prompt.pools else SamplingTask)(
            params=drawn,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=frozenset(params.stop_token_ids).union(eos_token_ids),
            eos_token_id=eos_token_ids[0] if eos_token_ids else None,
            seed=self._seed(request_id) if params.seed is None else params.seed,
            bad_words_token_ids=prompt.bad_words,
            has_grammar=params.structured_outputs is not None,
        )
        facts = msgspec.structs.asdict(terms) | {"arrival_time": arrival, "cache_salt": prompt.cache_salt}
        request = NewRequest(request_id=request_id, prompt_token_ids=token_ids, task=task, **facts)
        if not self._calls_functions or self._config.args.num_ranks > 1:
            try:  # now, as a step's plan that holds it could not be sent either; but for the tokens, which are checked
                msgspec.msgpack.encode(msgspec.structs.replace(request, prompt_token_ids=[]))
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidRequestError(f"the request can't be sent to the engine: {error}; drop that.") from None
        return ProcessedInput(request, prompt.text, params)

    def _encode(self, text: Any, params: SamplingParams, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            what = "a string, a list of token ids, or a dict with one of them"
            raise bad_prompt(f"a prompt is {what}; got {type(text).__name__}.")
        if self._tokenizer is None:
            raise bad_prompt("a text prompt needs a tokenizer, but skip_tokenizer_init=True; pass prompt_token_ids.")
        limit = self._model.max_model_len
        if params.truncate_prompt_tokens is None and len(text) > limit:
            least = len(text) // self._longest_token
            if least > limit:  # not worth the seconds that it takes to encode megabytes
                raise prompt_too_long(f"at least {least}", limit)
        token_ids = self._tokenizer.encode(text, add_special_tokens)
        if not token_ids:
            raise bad_prompt("the prompt is empty: this tokenizer makes no token of it; pass some text.")
        size = self._model.vocab_size
        if (largest := max(token_ids)) >= size:
            token = f"{self._tokenizer.convert_ids_to_tokens(largest)!r} (id {largest})"
            why = f"the text holds the token {token}, which is out of the model's vocabulary, 0 to {size - 1}"
            raise bad_prompt(f"{why}. Drop it from the text, or use a tokenizer made for this model.")
        return token_ids

    def _checked(self, token_ids: Any) -> list[int]:
        if isinstance(token_ids, str | bytes | bytearray | memoryview) or not isinstance(token_ids, Iterable):
            raise bad_prompt(f"prompt_token_ids must be a list of ints, got {type(token_ids).__name__}.")
        ids = list(token_ids)
        if set(map(type, ids)) != {int}:  # as a list from JSON or from a tokenizer is, without a look at each
            ids = [_token_id(value, place) for place, value in enumerate(ids)]
        if not ids:
            raise bad_prompt("the prompt is empty; pass at least one token id.")
        size = self._model.vocab_size
        for wrong in (min(ids), max(ids)):
            if not 0 <= wrong < size:
                place = ids.index(wrong)
                raise bad_prompt(f"token id {wrong} (place {place}) is out of the vocabulary, 0 to {size - 1}.")
        return ids

    @cached_property
    def _longest_token(self) -> int:
        """The most characters that a token can stand for: its spelling is never shorter than its text."""
        assert self._tokenizer is not None, "a text without a tokenizer was refused above"
        return max(map(len, self._tokenizer.get_vocab()))

    def _find_bad_words(self, *words: str) -> list[list[int]]:
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
        key = f"{self._config.args.seed}:{request_id}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _read_prompt(prompt: Any) -> tuple[Any, Any, str | None]:
    """Text, token ids and salt of a prompt in any form; the first two are yet to be checked."""
    if isinstance(prompt, dict):
        unknown = {key for key in prompt if prompt[key] is not None} - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown:
            known = "a prompt dict has 'prompt' or 'prompt_token_ids', and may have 'cache_salt'"
            raise bad_prompt(f"unknown prompt entry {min(unknown, key=str)!r}; models take text only: {known}.")
        cache_salt = prompt.get("cache_salt")
        require(isinstance(cache_salt, str | None) and cache_salt != "", "cache_salt", cache_salt, "a non-empty string")
        return prompt.get("prompt"), prompt.get("prompt_token_ids"), cache_salt
    if isinstance(prompt, Iterable) and not isinstance(prompt, str | bytes | bytearray | memoryview):
        return None, prompt, None
    return prompt, None, None


def _token_id(value: Any, place: int) -> int:
    if (token_id := number(value, int)) is None:
        raise bad_prompt(f"token id {place} is {repr(value)[:80]}; ids must be integers.")
    return token_id
