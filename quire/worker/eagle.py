"""Drafts by an EAGLE head, which reads each token with the model's hidden state before it, and goes on from its own.

All that the model computes of a sequence the head reads, too, when drafts are wanted next, or when there is much of it;
drafts that were accepted with their true hidden states. What a cached prefix, or a time without drafts, has left
unknown is taken as its neighbour: that may cost acceptance. The head's layer comes after the model's in the same KV
groups, so that blocks are shared, copied and swapped with theirs. The worker makes one where the configuration names a
head. It knows rows, and no plan.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.draft_tree import DraftTree
from quire.config.speculative import SpeculativeConfig
from quire.config.worker import WorkerConfig
from quire.models.causal_lm import CausalLM, RunnableModel
from quire.models.compiled_eagle import CompiledEagle, RunnableHead, TimedHead
from quire.models.eagle import EagleHead
from quire.models.eagle_config import check_eagle_head, eagle_names, eagle_taps, our_name
from quire.models.growing_tree import GrowingTrees
from quire.models.heads import fill_heads, open_heads
from quire.models.held_states import HeldStates
from quire.models.weights import CheckpointFormat, weight_slots
from quire.sampling.waves import sample_ahead
from quire.speculative.base import ComputedSpan, DraftedSequence, Proposer
from quire.worker.devices.base import Device
from quire.worker.drafting import Drafter, Order, draft_in_steps, draft_natively, drafting_state, drafts_of, rank_tokens
from quire.worker.gather import StepBatch, gather_nodes, gather_tokens
from quire.worker.rows import RowTable

_MOST_HELD = 512  # hidden states of a sequence that wait for drafts to be wanted
_MOST_HELD_OF_ALL = 16384


class EagleModel(Drafter):
    """The EAGLE head of a configuration that names one; `load` fills it.

    Attributes:
        config, device: what it was made with.
        runnable: the head as it is run, compiled once it is loaded.
        taps: the model's layers whose outputs it reads; none for the last hidden state alone.
    """

    def __init__(self, config: WorkerConfig, speculative: SpeculativeConfig, device: Device, model: CausalLM) -> None:
        assert config.draft is not None, "no head is configured"
        self.config, self.device, self._model = config, device, model
        draft = config.draft
        found = open_heads(draft.path, draft.model, load_format=config.load_format)
        self._checkpoint = found.made_for(speculative.method)
        check_eagle_head(draft, config.model)
        builder = self.builder(speculative, model)
        taps = eagle_taps(draft, config.model) if speculative.method == "eagle3" else None
        own = {our_name(name) for name in self._checkpoint.shapes}
        self.model = device.place(lambda: EagleHead(draft, builder, model, own, taps))
        self.module, self.taps = self.model, self.model.layers_read
        self.layers = self.model.cache_layers
        self.assign_groups = builder.context.assign_groups
        self.runnable: RunnableHead = self.model  # until it is loaded

    def load(self, progress: bool) -> None:
        """Fill it with its weights (ModelLoadError where they are missing, broken, or of another model)."""
        names = eagle_names(self._checkpoint.shapes, weight_slots(self.model, CheckpointFormat()))
        fill_heads(self.model, self._checkpoint, names, self.model.dtype, self.config.model.seed)
        width = self._model.embedding.shape.in_features
        self.runnable = self.device.compile_head(self.model, [width] * max(1, len(self.taps)))
        self.timed = TimedHead(self.runnable, self.model.num_hidden)

    def proposer(self, model: RunnableModel, table: RowTable, caches: list[Tensor]) -> Proposer:
        return EagleProposer(self, table, caches)


class EagleProposer(Proposer):
    """Drafts a chain, or a tree, for all sequences at once: one token, or level, of each after another."""

    reads_all = True

    def __init__(self, eagle: EagleModel, table: RowTable, caches: list[Tensor]) -> None:
        head = eagle.runnable
        self.max_drafts, self.taps, self._tree = eagle.config.max_num_drafts, eagle.taps, eagle.config.draft_tree
        self._device, self._head, self._table, self._caches = eagle.device, head, table, caches
        self._rounds = head.rounds(caches) if isinstance(head, CompiledEagle) else None

    def read(self, spans: Sequence[ComputedSpan], hidden: Tensor, taps: Sequence[Tensor]) -> None:
        fused = self._head.fuse(taps or [hidden])
        reading: list[DraftedSequence] = []
        stops: list[int] = []
        most = min(_MOST_HELD, _MOST_HELD_OF_ALL // len(spans))
        for row, start, first, count, num_drafts in spans:
            own: HeldStates = row.memory or HeldStates()
            row.memory = own
            part = fused[first : first + count]
            own.settle(row.tokens.ids, row.tokens.num)
            # A few rows would keep all of a large step's alive, and a device makes its next step's in the same place.
            own.add(start, part if fused is not hidden and count * 4 >= len(fused) else part.clone())
            stop = start + count - num_drafts
            if self._tree is not None:
                own.expect(self._tree, row.tokens.drafts()[:num_drafts])
            if stop - own.num_read > most:
                reading.append(row)
                stops.append(stop)
        if reading:
            self._read(reading, stops)

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        orders: list[Order] = []
        for row in rows:
            own: HeldStates | None = row.memory
            num = row.tokens.num
            if own is None or own.end < num - 1:  # what was computed last was not read
                continue
            own.settle(row.tokens.ids, num)
            own.cut(num - 1)
            count = min(row.max_drafts, self._table.num_slots(row.sequence_id) - num + 1)
            if count > 0:
                orders.append(Order(row, drafting_state(row), own.num_read, num, count))
        return drafts_of(rows, orders, self._draft)

    def num_behind(self, row: DraftedSequence) -> int:
        own: HeldStates | None = row.memory
        return row.tokens.num - own.num_read if own is not None else 0

    def forget(self, row: DraftedSequence) -> None:
        """Read what was held of one that was drafted for, as its blocks may serve others."""
        own: HeldStates | None = row.memory
        if own is None or own.num_read == own.first:
            return
        own.settle(row.tokens.ids, row.tokens.num)
        if (stop := min(own.end, row.tokens.num - 1)) > own.num_read:
            self._read([row], [stop])

    def _read(self, rows: Sequence[DraftedSequence], stops: Sequence[int]) -> None:
        """Read the tokens up to positions `stops`."""
        reading: list[HeldStates] = [row.memory for row in rows]
        starts = [own.num_read for own in reading]
        counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
        hidden = torch.cat([part for own, stop in zip(reading, stops, strict=True) for part in own.take(stop)])
        self._run(rows, starts, counts, hidden)

    def _draft(self, orders: Sequence[Order]) -> None:
        """Read with the hidden states before, then draw as the sampler would.

        Where drafts are a tree, its first nodes: the best choice is what would be drawn.
        """
        hidden = [part for order in orders for part in order.row.memory.take(order.stop)]
        if self._rounds is not None and self._tree is None:
            return draft_natively(self._rounds, self._table, orders, hidden)
        before = torch.cat(hidden)
        if self._tree is not None:
            return self._grow(self._tree, orders, before)

        def draw(
            orders: list[Order], starts: list[int], counts: list[int], kept: list[int] | None, num_drawn: int
        ) -> list[int | None]:
            nonlocal before
            if kept is not None:
                before = self._device.take_rows(before, kept)
            before = self._run([order.row for order in orders], starts, counts, before)
            logits = self._head.spread(self._head.compute_logits(before))
            return sample_ahead(logits, [order.state for order in orders], num_drawn, self._device.target)

        return draft_in_steps(orders, draw)

    def _grow(self, shape: DraftTree, orders: Sequence[Order], hidden: Tensor) -> None:
        """Trees: of each level what the sampler would draw and what is likeliest, then the head on all its nodes."""
        trees = GrowingTrees(shape, [order.num_drafts for order in orders])
        counts = [order.stop - order.start for order in orders]
        hidden = self._run([order.row for order in orders], [order.start for order in orders], counts, hidden)
        while True:
            logits, wanted = self._head.spread(self._head.compute_logits(hidden)), trees.wanted
            states, num_choices = [orders[i].state for i, _ in wanted], [num for _, num in wanted]
            greedy = all(one.greedy for one in states)
            drawn = () if greedy else sample_ahead(logits, states, trees.depth, self._device.target)
            parents = trees.grow(rank_tokens(self._device.target, logits, states, num_choices), drawn)
            if not parents:
                for i, order in enumerate(orders):
                    order.drafts = trees.drafts(i)
                return
            for i in trees.growing:
                orders[i].row.tokens.set_drafts(trees.drafts(i))
            rows = [self._table.rows[orders[i].row.sequence_id] for i in trees.growing]
            stops = [orders[i].stop for i in trees.growing]
            nodes = gather_nodes(rows, stops, [0] * len(rows), trees.levels, self._table)
            hidden = self._compute(nodes, self._device.take_rows(hidden, parents))

    def _compute(self, batch: StepBatch, hidden: Tensor) -> Tensor:
        """[T, H]."""
        input_ids, step = self._device.upload(batch.arrays, self._caches)
        return self._head(input_ids, hidden, step)

    def _run(
        self, rows: Sequence[DraftedSequence], starts: Sequence[int], counts: Sequence[int], hidden: Tensor
    ) -> Tensor:
        """What the head makes of the last token of each, [R, H]."""
        batch = gather_tokens([self._table.rows[row.sequence_id] for row in rows], starts, counts, self._table)
        return self._device.take_rows(self._compute(batch, hidden), [end - 1 for end in batch.ends])
