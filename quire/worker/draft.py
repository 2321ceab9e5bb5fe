"""Drafts by a smaller model of the same vocabulary, which draws them with the random bits that the sampler will use.

So a drafted token is the one that the model would draw wherever both think alike. Its layers come after the model's in
the same KV groups, so that blocks are shared, copied and swapped with theirs; what it has not read yet of a sequence,
it reads first. The worker makes one where the configuration names a draft model. It knows rows, and no plan.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from quire.config.speculative import SpeculativeConfig
from quire.config.worker import WorkerConfig
from quire.models.causal_lm import RunnableModel
from quire.models.compiled import CompiledModel
from quire.models.registry import CausalLM
from quire.sampling.accept import draw_drafts
from quire.sampling.tokens import SequenceTokens
from quire.sampling.waves import sample_ahead
from quire.speculative.base import DraftedSequence, Proposer
from quire.worker.devices.base import Device
from quire.worker.drafting import Drafter, Order, draft_in_steps, draft_natively, drafting_state, drafts_of
from quire.worker.gather import gather_tokens
from quire.worker.rows import RowTable
from quire.worker.weights.build import build_packed
from quire.worker.weights.load import load_model_weights


class DraftModel(Drafter):
    """The draft model of a configuration that names one; `load` fills it.

    Attributes:
        config, speculative: what it was made with.
    """

    def __init__(self, config: WorkerConfig, speculative: SpeculativeConfig, device: Device, model: CausalLM) -> None:
        assert config.draft is not None, "no draft model is configured"
        self.config, self._draft, self.device = config, config.draft, device
        self.speculative = speculative
        self.model, self.store = build_packed(config, config.draft, speculative.quantization, device, False)
        self.module, self.layers = self.model, self.model.cache_layers
        self.assign_groups = self.model.assign_groups

    def load(self, progress: bool) -> None:
        """Fill it with its weights (ModelLoadError where they are missing or broken)."""
        load_model_weights(self.model, self._draft, load_format=self.config.load_format, progress=progress)
        self.store.finish()
        self.timed = self.device.compile(self.model)

    def proposer(self, model: RunnableModel, table: RowTable, caches: list[Tensor]) -> Proposer:
        return DraftModelProposer(self, table, caches)


@dataclass(slots=True)
class Reader:
    """How far the draft model has read a sequence.

    Attributes:
        num_read: tokens whose keys and values are in its caches.
        drafted: the last of them, from its newest drafts.
    """

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
    """Drafts for all sequences at once, one token of each after another: natively where the model is kernels alone.

    Under the acceptance "typical" what is likeliest is drafted; under "rejection" drafts have random bits of their own,
    and what they were drawn from is kept.
    """

    def __init__(self, draft: DraftModel, table: RowTable, caches: list[Tensor]) -> None:
        config, model = draft.speculative, draft.timed
        self.max_drafts, self._max_tokens = config.num_speculative_tokens, draft.config.max_num_batched_tokens
        self._sharpness = math.inf if config.acceptance == "typical" else 1.0
        self._draws_apart = config.acceptance == "rejection"
        self.from_prefix = config.acceptance != "exact"
        self._device, self._model, self._table, self._caches = draft.device, model, table, caches
        self._rounds = model.rounds(caches) if isinstance(model, CompiledModel) else None

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        if not self.from_prefix:
            return self._propose(rows)
        return [drafts for part in self._parts(rows) for drafts in self._propose(part)]

    def _propose(self, rows: Sequence[DraftedSequence]) -> list[list[int]]:
        orders: list[Order] = []
        budget = self._max_tokens
        for row in rows:
            reader: Reader = row.memory or Reader()
            row.memory, row.probs = reader, None
            num = row.tokens.num
            start = reader.keep_right(row.tokens)
            count = min(row.max_drafts, self._table.num_slots(row.sequence_id) - num + 1)
            if count <= 0:
                continue
            if num - start <= budget:
                budget -= num - start
                orders.append(Order(row, drafting_state(row, self._sharpness), start, num, count))
            elif budget == self._max_tokens:  # it will take several steps
                self._compute([row], [start], [budget])
                reader.num_read += budget
                budget = 0
        drafts = drafts_of(rows, orders, self._draft)
        for order in orders:
            reader = order.row.memory
            reader.drafted = order.drafts[: order.num_drafts - 1]
            reader.num_read = order.stop + len(reader.drafted)
            if order.probs:
                order.row.probs = torch.from_numpy(np.stack(order.probs))
        return drafts

    def _parts(self, rows: Sequence[DraftedSequence]) -> Iterator[list[DraftedSequence]]:
        """The rows, in parts whose unread tokens can be read at once; who is far behind reads some first."""
        part: list[DraftedSequence] = []
        budget = most = self._max_tokens
        for row in rows:
            reader: Reader = row.memory or Reader()
            row.memory = reader
            num = row.tokens.num
            reader.keep_right(row.tokens)
            while num - reader.num_read > most:
                self._compute([row], [reader.num_read], [most])
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

    def _draft(self, orders: Sequence[Order]) -> None:
        """Read and draw, as the sampler would at those positions."""
        if self._rounds is None or (self._draws_apart and not all(order.state.greedy for order in orders)):
            draft_in_steps(orders, self._draw)
        else:
            draft_natively(self._rounds, self._table, orders)

    def _draw(
        self, orders: list[Order], starts: list[int], counts: list[int], _: list[int] | None, num_drawn: int
    ) -> list[int | None]:
        logits = self._model.compute_logits(self._compute([order.row for order in orders], starts, counts))
        states = [order.state for order in orders]
        if not self._draws_apart:
            return sample_ahead(logits, states, num_drawn, self._device.target)
        drawn, probs = draw_drafts(logits, states, num_drawn, self._device.target)
        for order, drawn_from in zip(orders, probs, strict=True):
            order.probs += [drawn_from] if drawn_from is not None else []
        return drawn

    def _compute(self, rows: Sequence[DraftedSequence], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """The hidden state of the last token of each, [R, H]."""
        batch = gather_tokens([self._table.rows[row.sequence_id] for row in rows], starts, counts, self._table)
        hidden = self._model(*self._device.upload(batch.arrays, self._caches))
        return self._device.take_rows(hidden, [end - 1 for end in batch.ends])
