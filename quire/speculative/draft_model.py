"""Drafts by a smaller model of the same vocabulary, which draws them with the random bits that the sampler will use.

So a drafted token is the one that the model would draw wherever both think alike. Its keys and values lie in further
layers of the sequences' own blocks; what it has not read yet of a sequence, it reads first. The worker gives it a
`DraftRunner`; it knows no blocks itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
from torch import Tensor

from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.speculative.base import DraftedSequence, Proposer, Verdict


class DraftRunner(ABC):
    """A draft model, its caches, and the sequences' rows."""

    max_tokens: int  # of one run

    @abstractmethod
    def num_slots(self, row: DraftedSequence) -> int:
        """Positions of a sequence that have a place in the KV cache."""

    @abstractmethod
    def run(self, rows: Sequence[DraftedSequence], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Compute so many of each row's tokens and drafts from a position on.

        Returns:
            Logits [R, V] after the last one of each.
        """

    @abstractmethod
    def draw(self, logits: Tensor, states: Sequence[SamplingState], ahead: int) -> list[int | None]:
        """Draw as the sampler would for `ahead` positions beyond the next one; None where it can't be done."""

    @abstractmethod
    def sampling(self, row: DraftedSequence) -> tuple[SamplingParams, int, int]:
        """A sequence's parameters, seed and sequence index."""


class _Memory:
    """How far the draft model has read a sequence, and how it draws for it."""

    __slots__ = ("num_read", "state")

    def __init__(self, state: SamplingState) -> None:
        self.num_read = 0
        self.state = state


class DraftModelProposer(Proposer):
    """Drafts one token of all sequences after another.

    Args:
        max_drafts: of a sequence.
        vocab_size: the model's and the draft model's.
    """

    uses_hidden = False

    def __init__(self, max_drafts: int, vocab_size: int, runner: DraftRunner) -> None:
        self.max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._runner = runner

    def propose(
        self, rows: Sequence[DraftedSequence], hidden: Tensor, taps: Sequence[Tensor]
    ) -> Sequence[Sequence[int]]:
        drafts: dict[int, list[int]] = {row.sequence_id: [] for row in rows}
        drafting, starts, counts = self._catch_up(rows)
        num_drawn = 0
        while drafting:
            states = [row.memory.state for row in drafting]
            drawn = self._runner.draw(self._runner.run(drafting, starts, counts), states, num_drawn)
            num_drawn += 1
            going_on: list[DraftedSequence] = []
            for row, token_id in zip(drafting, drawn, strict=True):
                tokens = row.tokens
                row.memory.num_read = tokens.num + num_drawn - 1
                if token_id is None:
                    continue
                drafts[row.sequence_id].append(token_id)
                if num_drawn < row.max_drafts and tokens.num + num_drawn <= self._runner.num_slots(row):
                    tokens.set_drafts(drafts[row.sequence_id])
                    going_on.append(row)
            drafting = going_on
            starts, counts = [row.memory.num_read for row in drafting], [1] * len(drafting)
        return [drafts[row.sequence_id] for row in rows]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        pass

    def _catch_up(self, rows: Sequence[DraftedSequence]) -> tuple[list[DraftedSequence], list[int], list[int]]:
        """The rows that can be drafted for now, and what is to be read of each; others are read a part further."""
        drafting: list[DraftedSequence] = []
        starts: list[int] = []
        counts: list[int] = []
        budget = self._runner.max_tokens
        for row in rows:
            memory: _Memory | None = row.memory
            if memory is None:
                memory = row.memory = _Memory(self._state(row))
            num = row.tokens.num
            # Of what was drafted, it has read right what was accepted; the newest token is nobody's yet.
            start = memory.num_read = min(memory.num_read, num - 1)
            if num > self._runner.num_slots(row):
                continue
            if num - start <= budget:
                drafting.append(row)
                starts.append(start)
                counts.append(num - start)
                budget -= num - start
            elif budget == self._runner.max_tokens:
                self._runner.run([row], [start], [budget])
                memory.num_read += budget
                budget = 0
        return drafting, starts, counts

    def _state(self, row: DraftedSequence) -> SamplingState:
        """How the sampler draws for the sequence, but for what looks back at tokens or reports."""
        params, seed, sequence_index = self._runner.sampling(row)
        plain = msgspec.structs.replace(
            params,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            logits_processors=None,
            min_tokens=0,
            logprobs=None,
            prompt_logprobs=None,
        )
        return SamplingState(plain, row.tokens, seed=seed, sequence_index=sequence_index, vocab_size=self._vocab_size)
