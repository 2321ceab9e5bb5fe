"""Drafts by an EAGLE head, which reads each token with the model's hidden state before it, and goes on from its own.

All that the model computes of a sequence the head reads, too, when drafts are wanted next, or when there is much of it;
drafts that were accepted with their true hidden states. The worker gives it a `EagleRunner`; it knows no blocks itself.
What a cached prefix, or a time without drafts, has left unknown is taken as its neighbour: that may cost acceptance.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.draft_tree import DraftTree
from quire.models.held_states import HeldStates
from quire.sampling.state import SamplingState
from quire.speculative.base import ComputedSpan, DraftedSequence, Proposer
from quire.speculative.drawing import DraftRunner, Order, drafting_state

_MOST_HELD = 512  # hidden states of a sequence that wait for drafts to be wanted
_MOST_HELD_OF_ALL = 16384


class EagleRunner(DraftRunner):
    """An EAGLE head, its caches, and the sequences' rows.

    Attributes:
        taps: the model's layers whose outputs the head reads; none for the last hidden state.
    """

    taps: Sequence[int]

    @abstractmethod
    def fuse(self, hidden: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """What the head reads of the model's hidden states, [T, H]."""


class _Reading(HeldStates):
    """How far the head has read a sequence, and how it draws for it."""

    def __init__(self, state: SamplingState) -> None:
        super().__init__()
        self.state = state


class EagleProposer(Proposer):
    """Drafts a chain, or a tree, for all sequences at once: one token, or level, of each after another.

    Args:
        max_drafts: of a sequence.
        tree: the shape of the drafts, where they are no chain.
    """

    uses_hidden = False
    reads_all = True

    def __init__(self, max_drafts: int, runner: EagleRunner, tree: DraftTree | None = None) -> None:
        self.max_drafts, self.taps, self._tree = max_drafts, runner.taps, tree
        self._runner = runner

    def read(self, spans: Sequence[ComputedSpan], hidden: Tensor, taps: Sequence[Tensor]) -> None:
        fused = self._runner.fuse(hidden, taps)
        reading: list[DraftedSequence] = []
        stops: list[int] = []
        most = min(_MOST_HELD, _MOST_HELD_OF_ALL // len(spans))
        for row, start, first, count, num_drafts in spans:
            own: _Reading = row.memory or self._open(row)
            part = fused[first : first + count]
            own.settle(row.tokens.ids, row.tokens.num)
            # A few rows would keep all of a large step's alive.
            own.add(start, part if count * 4 >= len(fused) else part.clone())
            stop = start + count - num_drafts
            if self._tree is not None:
                own.expect(self._tree, row.tokens.drafts()[:num_drafts])
            if stop - own.num_read > most:
                reading.append(row)
                stops.append(stop)
        if reading:
            self._read(reading, stops)

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        drafts: list[list[int]] = [[] for _ in rows]
        orders: list[tuple[int, Order]] = []
        for place, row in enumerate(rows):
            own: _Reading | None = row.memory
            num = row.tokens.num
            if own is None or own.end < num - 1:  # what was computed last was not read
                continue
            own.settle(row.tokens.ids, num)
            own.cut(num - 1)
            count = min(row.max_drafts, self._runner.num_slots(row) - num + 1)
            if count > 0:
                orders.append((place, Order(row, own.state, own.num_read, num, count)))
        if not orders:
            return drafts
        orders.sort(key=lambda order: -order[1].num_drafts)
        taken = [part for place, order in orders for part in rows[place].memory.take(order.stop)]
        drawn = self._runner.draft([order for _, order in orders], taken)
        for (place, _), found in zip(orders, drawn, strict=True):
            drafts[place] = found
        return drafts

    def num_behind(self, row: DraftedSequence) -> int:
        own: _Reading | None = row.memory
        return row.tokens.num - own.num_read if own is not None else 0

    def forget(self, row: DraftedSequence) -> None:
        """Read what was held of one that was drafted for, as its blocks may serve others."""
        own: _Reading | None = row.memory
        if own is None or own.num_read == own.first:
            return
        own.settle(row.tokens.ids, row.tokens.num)
        if (stop := min(own.end, row.tokens.num - 1)) > own.num_read:
            self._read([row], [stop])

    def _read(self, rows: Sequence[DraftedSequence], stops: Sequence[int]) -> None:
        """Read the tokens up to positions `stops`."""
        reading: list[_Reading] = [row.memory for row in rows]
        starts = [own.num_read for own in reading]
        counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
        hidden = torch.cat([part for own, stop in zip(reading, stops, strict=True) for part in own.take(stop)])
        self._runner.read(rows, starts, counts, hidden)

    def _open(self, row: DraftedSequence) -> _Reading:
        found = row.memory = _Reading(drafting_state(row))
        return found
