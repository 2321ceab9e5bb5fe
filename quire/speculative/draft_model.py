"""Drafts by a smaller model of the same vocabulary, which draws them with the random bits that the sampler will use.

So a drafted token is the one that the model would draw wherever both think alike. Its keys and values lie in further
layers of the sequences' own blocks; what it has not read yet of a sequence, it reads first. The worker gives it a
`DraftRunner`; it knows no blocks itself.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from quire.config.speculative import SpeculativeConfig
from quire.sampling.state import SamplingState
from quire.sampling.tokens import SequenceTokens
from quire.speculative.base import DraftedSequence, Proposer
from quire.speculative.drawing import DraftRunner, Order, drafting_state


@dataclass(slots=True)
class Reader:
    """How far the draft model has read a sequence, and how it draws for it.

    Attributes:
        state: of the sampler, without what looks back.
        num_read: tokens whose keys and values are in its caches.
        drafted: the last of them, from its newest drafts.
    """

    state: SamplingState
    num_read: int = 0
    drafted: list[int] = field(default_factory=list)

    def keep_right(self, tokens: SequenceTokens) -> int:
        """Count as read what became tokens: others may have been forced instead. The newest token is nobody's yet."""
        start = self.num_read - len(self.drafted)
        became = tokens.ids[start : min(self.num_read, tokens.num - 1)].tolist()
        right = [*takewhile(lambda pair: pair[0] == pair[1], zip(became, self.drafted, strict=False))]
        self.num_read, self.drafted = min(start, tokens.num - 1) + len(right), []
        return self.num_read


class DraftModelProposer(Proposer):
    """Drafts for all sequences at once, one token of each after another.

    Args:
        config: the method's options; under the acceptance "typical" it drafts what is likeliest.
        max_tokens: most that are read at once.
    """

    uses_hidden = False

    def __init__(self, config: SpeculativeConfig, runner: DraftRunner, max_tokens: int) -> None:
        self.max_drafts = config.num_speculative_tokens
        self._runner, self._max_tokens = runner, max_tokens
        self._is_greedy = config.acceptance == "typical"
        self.from_prefix = config.acceptance != "exact"

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        if not self.from_prefix:
            return self._propose(rows)
        return [drafts for part in self._parts(rows) for drafts in self._propose(part)]

    def _propose(self, rows: Sequence[DraftedSequence]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in rows]
        runner, orders = self._runner, list[tuple[int, Order]]()
        budget = self._max_tokens
        for place, row in enumerate(rows):
            reader, row.probs = row.memory or self._open(row), None
            num = row.tokens.num
            start = reader.keep_right(row.tokens)
            count = min(row.max_drafts, runner.num_slots(row) - num + 1)
            if count <= 0:
                continue
            if num - start <= budget:
                budget -= num - start
                orders.append((place, Order(row, reader.state, start, num, count)))
            elif budget == self._max_tokens:  # it will take several steps
                runner.read([row], [start], [budget])
                reader.num_read += budget
                budget = 0
        if not orders:
            return drafts
        orders.sort(key=lambda order: -order[1].num_drafts)
        for (place, order), drawn in zip(orders, runner.draft([order for _, order in orders]), strict=True):
            reader = rows[place].memory
            reader.drafted = drawn[: order.num_drafts - 1]
            reader.num_read = order.stop + len(reader.drafted)
            drafts[place] = drawn
            if order.probs:
                rows[place].probs = torch.from_numpy(np.stack(order.probs))
        return drafts

    def _parts(self, rows: Sequence[DraftedSequence]) -> Iterator[list[DraftedSequence]]:
        """The rows, in parts whose unread tokens can be read at once; who is far behind reads some first."""
        part: list[DraftedSequence] = []
        budget = most = self._max_tokens
        for row in rows:
            reader, num = row.memory or self._open(row), row.tokens.num
            reader.keep_right(row.tokens)
            while num - reader.num_read > most:
                self._runner.read([row], [reader.num_read], [most])
                reader.num_read += most
            if num - reader.num_read > budget:
                yield part
                part, budget = [], most
            part.append(row)
            budget -= num - reader.num_read
        yield part

    def num_behind(self, row: DraftedSequence) -> int:
        reader: Reader | None = row.memory
        return row.tokens.num - (reader.num_read if reader is not None else 0)

    def _open(self, row: DraftedSequence) -> Reader:
        reader = row.memory = Reader(drafting_state(row, math.inf if self._is_greedy else 1.0))
        return reader
