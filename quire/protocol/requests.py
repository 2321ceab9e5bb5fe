"""Requests on their way down: what the engine hands to the scheduler, and a worker is told once.

The input processor makes them, validated. All are msgspec structs without tensors, so that they cross a process border
unchanged. They know nothing of steps or blocks.
"""

import msgspec

from quire.sampling_params import SamplingParams


class SamplingTask(msgspec.Struct, frozen=True, kw_only=True, tag="sampling"):
    """Draw tokens after the prompt. What depends on the model is resolved here, once."""

    params: SamplingParams
    max_tokens: int  # output tokens allowed, so that prompt + output <= max_model_len; >= 1
    stop_token_ids: frozenset[int]  # end-of-sequence ids (unless ignore_eos) and the user's stop_token_ids
    eos_token_id: int | None = None  # the model's first end-of-sequence id: of all that stop, it alone needs no reason
    seed: int  # 64-bit key of the request's random numbers
    bad_words_token_ids: list[list[int]] = []  # token sequences that must never be completed
    first_sequence_index: int = 0  # > 0 when one request is split into several that must draw as its forks would
    # Every token is drawn under a mask of the step's SampleGuide: params.structured_outputs says which.
    has_grammar: bool = False

    @property
    def num_sequences(self) -> int:
        """How many outputs the engine brings: sequences drawn from the prompt (best_of, or n); the n best of beams."""
        return self.params.n if self.params.use_beam_search else self.params.best_of or self.params.n

    @property
    def num_beams(self) -> int:
        """How many sequences a beam search keeps; 0: tokens are drawn."""
        return (self.params.best_of or self.params.n) if self.params.use_beam_search else 0

    @property
    def num_candidates(self) -> int:
        """Candidates of a beam: if all that can end the sequence are among them, there are enough to go on with."""
        return max(2, 1 + len(self.stop_token_ids)) * self.num_beams


class PoolingTask(SamplingTask, frozen=True, kw_only=True, tag="pooling"):
    """One vector for the whole prompt: the request ends when its prompt is computed, with a token of no meaning."""


NUM_IDS = 2**31  # that users can give adapters


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """The adapter (LoRA, or virtual tokens) that a request runs with."""

    adapter_id: int  # >= 1, unique in the engine's life: the user's, plus NUM_IDS for each later version of its files
    digest: bytes  # of its files; part of every block's name in the prefix cache
    name: str = ""  # for people
    path: str = ""  # of its folder
    num_virtual: int = 0  # tokens that it has before the prompt; 0: it is a LoRA

    @property
    def param(self) -> str:
        """The parameter that users name it by."""
        return "prompt_adapter_request" if self.num_virtual else "lora_request"


class Terms(msgspec.Struct, frozen=True):
    """On what terms a request is served."""

    priority: int = 0  # lower runs first under the "priority" policy
    client: str | None = None  # whose request it is, for the "fair" policy
    ttft_target: float | None = None  # seconds from arrival to first token, for "deadline"; None: the engine's
    tpot_target: float | None = None  # seconds between tokens, likewise
    adapter: AdapterRef | None = None


class NewRequest(Terms, frozen=True, kw_only=True):
    """A validated request, with its terms. It crosses to each worker once; sequences refer to it by its id."""

    request_id: str
    prompt_token_ids: list[int]  # never empty, each in the vocabulary; zeros first for an adapter's virtual tokens
    task: SamplingTask | PoolingTask
    cache_salt: str | None = None  # requests share cached prefixes only with the same salt
    arrival_time: float = 0.0  # seconds of the engine's clock, which is monotonic

    @property
    def num_virtual(self) -> int:
        """Virtual tokens that the prompt begins with, which nobody but the model knows of."""
        return 0 if self.adapter is None else self.adapter.num_virtual
