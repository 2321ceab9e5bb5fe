"""The mutable state of requests and their sequences.

Made and changed by the scheduler only; everything that leaves it is a frozen message of `quire.protocol`. A sequence
knows its tokens and its block table, and nothing of queues or of the other requests.
"""

from enum import Enum, auto
from typing import Any

from quire.kvcache.manager import BlockTable
from quire.protocol.step import NewRequest, NewSequence


class SequenceStatus(Enum):
    """Where a sequence is; it holds blocks while it is RUNNING only."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class SequenceGroup:
    """A request and the sequences drawn from its prompt.

    Attributes:
        key: the policy's sort key; smaller runs earlier.
        unfinished: indices 0 .. num_sequences - 1 that have not ended yet.
        sequences: the live sequences by index; only the root, index 0, until the prompt's end forks the others off.
        forked: whether all sequences have been made.
        num_cached_tokens: prompt tokens found in the prefix cache at first; None before the first admission.
        num_prompt_logprobs: prompt positions whose logprobs were delivered, the first (which has none) included.
    """

    __slots__ = (
        "forked",
        "key",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_prompt_logprobs",
        "num_sequences",
        "request",
        "sequences",
        "stop_token_ids",
        "unfinished",
    )

    def __init__(self, request: NewRequest, key: tuple[Any, ...]) -> None:
        self.request = request
        self.key = key
        self.num_sequences = request.num_sequences
        self.max_tokens = request.max_tokens
        self.min_tokens = request.sampling_params.min_tokens
        self.stop_token_ids = request.stop_token_ids
        self.unfinished = set(range(self.num_sequences))
        self.sequences: dict[int, Sequence] = {}
        self.forked = self.num_sequences == 1
        self.num_cached_tokens: int | None = None
        self.num_prompt_logprobs = 1

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs were asked for and are still to come, for which the prompt must be computed."""
        return self.request.sampling_params.prompt_logprobs is not None and self.num_prompt_logprobs < len(
            self.request.prompt_token_ids
        )


class Sequence:
    """One sequence: its tokens, how many of them have keys and values, and its block table.

    Attributes:
        sequence_id: unique in the engine's life.
        index: 0 .. num_sequences - 1 within its request.
        key: sort key in the queues; unique.
        num_tokens: prompt and output tokens.
        num_computed_tokens: tokens whose keys and values are in the blocks; always less than num_tokens.
        announced: whether the runner holds a row for it.
    """

    __slots__ = (
        "announced",
        "group",
        "index",
        "key",
        "num_computed_tokens",
        "num_tokens",
        "output_token_ids",
        "sequence_id",
        "status",
        "table",
    )

    def __init__(self, sequence_id: int, group: SequenceGroup, index: int, table: BlockTable) -> None:
        self.sequence_id = sequence_id
        self.group = group
        self.index = index
        self.key = (*group.key, index)
        self.table = table
        self.output_token_ids = table.output_token_ids
        self.num_tokens = table.num_tokens
        self.num_computed_tokens = 0
        self.status = SequenceStatus.WAITING
        self.announced = False

    def num_samples(self, num_new_tokens: int) -> int:
        """Tokens to sample when so many more are computed: none before the last known token is reached."""
        if self.num_computed_tokens + num_new_tokens < self.num_tokens:
            return 0
        return 1 if self.group.forked else self.group.num_sequences

    def announcement(self) -> NewSequence:
        """The sequence as the runner gets to know it."""
        request = self.group.request
        return NewSequence(
            sequence_id=self.sequence_id,
            request_id=request.request_id,
            sequence_index=request.first_sequence_index + self.index,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self.output_token_ids.copy(),
            sampling_params=request.sampling_params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            block_ids=self.table.block_ids.copy(),
            num_computed_tokens=self.num_computed_tokens,
        )
