"""Drafts by an EAGLE head, which reads each token with the model's hidden state before it, and goes on from its own.

All that the model computes of a sequence the head reads, too: a prompt's parts at once, what was decoded when drafts
are wanted next, drafts that were accepted with their true hidden states. The worker gives it a `EagleRunner`; it knows
no blocks itself. What a cached prefix has left unknown is taken as its neighbour: that may cost acceptance, no more.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.models.held_states import HeldStates
from quire.sampling.state import SamplingState
from quire.speculative.base import ComputedSpan, DraftedSequence, Proposer, Verdict
from quire.speculative.drawing import Drawing, drafting_state

_MOST_HELD = 48  # hidden states of a sequence that wait for drafts to be wanted


class EagleRunner(ABC):
    """An EAGLE head, its caches, and the sequences' rows.

    Attributes:
        taps: the model's layers whose outputs the head reads; none for the last hidden state.
    """

    taps: Sequence[int]

    @abstractmethod
    def open(self, row: DraftedSequence) -> tuple[Any, Drawing]:
        """The runner's own of a sequence, and what it is drawn with."""

    @abstractmethod
    def num_slots(self, own: Any) -> int:
        """Positions of a sequence that have a place in the KV cache."""

    @abstractmethod
    def fuse(self, hidden: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """What the head reads of the model's hidden states, [T, H]."""

    @abstractmethod
    def run(self, rows: Sequence[Any], starts: Sequence[int], counts: Sequence[int], hidden: Tensor) -> Tensor:
        """Read so many of each row's tokens and drafts from a position on, with the hidden state before each.

        Returns:
            What the head makes of the last one of each, [R, H].
        """

    @abstractmethod
    def draw(self, hidden: Tensor, states: Sequence[SamplingState], ahead: int) -> list[int | None]:
        """Draw as the sampler would for `ahead` positions beyond the next one; None where it can't be done."""


class _Reading(HeldStates):
    """How far the head has read a sequence, and how it draws for it."""

    def __init__(self, own: Any, state: SamplingState) -> None:
        super().__init__()
        self.own, self.state = own, state


class EagleProposer(Proposer):
    """Drafts a chain for all sequences at once, one token of each after another.

    Args:
        max_drafts: of a sequence.
        vocab_size: the model's.
        acceptance: the configuration's; under "typical" it drafts what is likeliest.
    """

    uses_hidden = False
    reads_all = True

    def __init__(self, max_drafts: int, vocab_size: int, runner: EagleRunner, acceptance: str = "exact") -> None:
        self.max_drafts, self.taps = max_drafts, runner.taps
        self._vocab_size = vocab_size
        self._runner = runner
        self._sharpness = math.inf if acceptance == "typical" else 1.0

    def read(self, spans: Sequence[ComputedSpan], hidden: Tensor, taps: Sequence[Tensor]) -> None:
        fused = self._runner.fuse(hidden, taps)
        reading: list[_Reading] = []
        stops: list[int] = []
        for row, start, first, count, num_drafts in spans:
            own: _Reading = row.memory or self._open(row)
            part = fused[first : first + count]
            # A few rows would keep all of a large step's alive.
            own.add(start, part if count * 4 >= len(fused) else part.clone())
            stop = start + count - num_drafts
            if count > num_drafts + 1 or stop - own.num_read > _MOST_HELD:
                reading.append(own)
                stops.append(stop)
        if reading:
            self._read(reading, stops)

    def propose(
        self, rows: Sequence[DraftedSequence], hidden: Tensor, taps: Sequence[Tensor]
    ) -> Sequence[Sequence[int]]:
        drafts: list[list[int]] = [[] for _ in rows]
        places: list[int] = []
        counts: list[int] = []
        for place, row in enumerate(rows):
            own: _Reading = row.memory
            num = row.tokens.num
            own.cut(num - 1)
            count = min(row.max_drafts, self._runner.num_slots(own.own) - num + 1)
            if count > 0:
                places.append(place)
                counts.append(count)
        if not places:
            return drafts
        several: list[_Reading] = [rows[place].memory for place in places]
        states = self._read(several, [rows[place].tokens.num for place in places])
        num_drawn = 0
        while places:
            drawn = self._runner.draw(states, [own.state for own in several], num_drawn)
            num_drawn += 1
            going_on: list[int] = []
            for i, (place, token_id) in enumerate(zip(places, drawn, strict=True)):
                if token_id is not None:
                    drafts[place].append(token_id)
                    if num_drawn < counts[i]:
                        rows[place].tokens.set_drafts(drafts[place])
                        going_on.append(i)
            if len(going_on) < len(places):
                states = states[going_on] if going_on else states
                places, counts = [places[i] for i in going_on], [counts[i] for i in going_on]
                several = [several[i] for i in going_on]
            if places:
                starts = [rows[place].tokens.num + num_drawn - 1 for place in places]
                states = self._runner.run([own.own for own in several], starts, [1] * len(places), states)
        return drafts

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        pass

    def num_behind(self, row: DraftedSequence) -> int:
        own: _Reading | None = row.memory
        return row.tokens.num - own.num_read if own is not None else 0

    def forget(self, row: DraftedSequence) -> None:
        """Read what was held, as its blocks may serve others."""
        own: _Reading | None = row.memory
        if own is not None and (stop := min(own.end, row.tokens.num - 1)) > own.num_read:
            self._read([own], [stop])

    def _read(self, reading: Sequence[_Reading], stops: Sequence[int]) -> Tensor:
        """Read the tokens up to positions `stops`; returns what came of the last one of each, [R, H]."""
        starts = [own.num_read for own in reading]
        counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
        taken = [part for own, stop in zip(reading, stops, strict=True) for part in own.take(stop)]
        hidden = taken[0] if len(taken) == 1 else torch.cat(taken)
        return self._runner.run([own.own for own in reading], starts, counts, hidden)

    def _open(self, row: DraftedSequence) -> _Reading:
        own, drawing = self._runner.open(row)
        found = _Reading(own, drafting_state(drawing, row.tokens, self._vocab_size, self._sharpness))
        row.memory = found
        return found
