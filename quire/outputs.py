"""What a request gives back to its user: texts, tokens, log-probabilities, why it ended, how long it took.

Made by the output processor, read by users. Names and fields are vLLM's. Knows nothing of the engine.
"""

from dataclasses import dataclass, fields, make_dataclass
from operator import attrgetter
from typing import Any

from msgspec import Struct, structs

from quire.errors import InvalidRequestError

_SHOWN_TOKENS = 16  # repr shows this many of a list of tokens


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float  # natural log, of the raw distribution
    rank: int | None = None  # 1 = most likely
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds as of `time.time()`; None where they have not.

    Differences are exact: that clock is asked at the process's start alone, and what has passed since then is added.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that computed any of the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


_OTHER_NAMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "last_token_time")  # vLLM's, of these
for _name, _field in zip(_OTHER_NAMES, (*fields(RequestMetrics), fields(RequestMetrics)[-1]), strict=True):
    setattr(RequestMetrics, _name, property(attrgetter(_field.name)))


class _Output(Struct):
    """What is shown in few words."""

    def __repr__(self) -> str:
        """Every field that says something: no None, long token lists and logprobs cut with their length."""
        parts: list[str] = []
        for name, value in structs.asdict(self).items():
            if value is None:
                continue
            if name in ("token_ids", "prompt_token_ids") and len(value) > _SHOWN_TOKENS:
                shown = f"{repr(value[:_SHOWN_TOKENS])[:-1]}, ... {len(value)} tokens]"
            else:
                shown = f"[{len(value)} positions]" if name in ("logprobs", "prompt_logprobs") else repr(value)
            parts.append(f"{name}={shown}")
        return f"{type(self).__name__}({', '.join(parts)})"


class CompletionOutput(_Output, gc=False):
    """One sequence's output."""

    index: int  # among the request's outputs
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # sum over token_ids, where logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # one dict (token id -> Logprob) per token
    finish_reason: str | None = None  # "stop", "length", "abort"; None while it runs
    stop_reason: int | str | None = None  # the user's stop token id or string that ended it

    def finished(self) -> bool:
        """Whether this sequence has ended."""
        return self.finish_reason is not None


# vLLM's is a dataclass: scripts call `dataclasses.asdict` and `replace`.
CompletionOutput.__dataclass_fields__ = make_dataclass("_", CompletionOutput.__struct_fields__).__dataclass_fields__  # type: ignore[attr-defined]


class RequestOutput(_Output):
    """A request's output so far, or the last of it when `finished`."""

    request_id: str
    prompt: str | None  # None where the prompt came as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # one per prompt token; the first is None
    outputs: list[CompletionOutput] = []
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None  # prompt tokens taken from the prefix cache
    lora_request: Any = None
    error: InvalidRequestError | None = None  # what of its parameters ended it, with finish_reason "error"
    pooled: list[float] | None = None  # of a request for a vector: the last token's hidden state, after the final norm

    kv_transfer_params = encoder_prompt = encoder_prompt_token_ids = None  # for scripts of vLLM's, which look for them


@dataclass(slots=True)
class EmbeddingOutput:
    """A text as a vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass(slots=True)
class PoolingOutput:
    """The same, as `LLM.encode` gives it."""

    data: Any  # a tensor, float32 [H]


@dataclass(slots=True)
class PoolingRequestOutput:
    """What a request for a vector gives back."""

    request_id: str
    outputs: Any  # PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput):
    """The same; `outputs` is an EmbeddingOutput."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the outputs of a beam search."""

    tokens: list[int]  # the prompt's, and then the output's
    logprobs: list[dict[int, Logprob]]  # one dict (token id -> Logprob) per output token
    lora_request: Any = None
    cum_logprob: float = 0.0  # sum over the output tokens
    text: str | None = None  # of all tokens; None without a tokenizer
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What a beam search found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]
