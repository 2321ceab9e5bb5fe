"""An EAGLE head beside the model: built, filled, and run on the rows' tokens and blocks.

The worker makes one where the configuration names a head. Its layer comes after the model's in the same KV groups, so
that blocks are shared, copied and swapped with theirs. It knows rows, and no plan.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.draft_tree import DraftTree
from quire.config.worker import WorkerConfig
from quire.models.builder import BuildContext, Builder
from quire.models.causal_lm import CausalLM, RunnableModel
from quire.models.compiled_eagle import CompiledEagle
from quire.models.eagle import EagleHead, RunnableHead, TimedHead
from quire.models.eagle_config import LEFT, check_eagle_head, eagle_taps, our_name
from quire.models.growing_tree import GrowingTrees
from quire.models.weights import CheckpointFormat, weight_slots
from quire.sampling.waves import sample_ahead
from quire.speculative.base import DraftedSequence, Proposer
from quire.speculative.drawing import Ints, Order, rank_tokens
from quire.speculative.eagle import EagleProposer, EagleRunner
from quire.speculative.pace import StepCosts
from quire.worker.devices.base import Device
from quire.worker.drafting import Drafter, draft_in_steps, draft_natively
from quire.worker.gather import StepBatch, gather_nodes, gather_tokens
from quire.worker.heads import fill_heads, open_heads
from quire.worker.rows import RowTable
from quire.worker.weights.store import WeightStore

_SIZES = [1, 4, 16, 64]  # tokens of the steps that are timed


class EagleModel(Drafter):
    """The EAGLE head of a configuration that names one; `load` fills it.

    Attributes:
        taps: the model's layers whose outputs it reads; none for the last hidden state alone.
    """

    def __init__(self, config: WorkerConfig, device: Device, model: CausalLM) -> None:
        assert config.draft is not None, "no head is configured"
        assert config.speculative is not None, "a head, and nothing that uses it"
        self._config, self._device, self._model = config, device, model
        draft, speculative = config.draft, config.speculative
        self._max_drafts = speculative.max_drafts
        found = open_heads(draft.path, draft.model, load_format=config.load_format)
        self._checkpoint = found.made_for(speculative.method)
        check_eagle_head(draft, config.model)
        self._names = {name: our_name(name) for name in self._checkpoint.shapes}
        self.store = WeightStore(None)
        formats = device.weight_formats(speculative.quantization, self.store)
        builder = Builder(BuildContext(device.backend, formats, model.dtype))
        taps = eagle_taps(draft, config.model) if speculative.method == "eagle3" else None
        self.model = EagleHead(draft, builder, model, set(self._names.values()), taps)
        self.module, self.taps = self.model, self.model.layers_read
        self.layers = self.model.cache_layers
        self.assign_groups = builder.context.assign_groups
        self._runnable: RunnableHead = self.model  # until it is loaded

    def load(self, progress: bool) -> None:
        """Fill it with its weights (ModelLoadError where they are missing, broken, or of another model)."""
        own = weight_slots(self.model, CheckpointFormat())
        known = {theirs: ours for theirs, ours in self._names.items() if ours in own or ours.endswith(LEFT)}
        names = {theirs: ours if ours in own else None for theirs, ours in known.items()}
        fill_heads(self.model, self._checkpoint, names, self.model.dtype, self._config.model.seed)
        width = self._model.embedding.shape.in_features
        self._runnable = self._device.compile_head(self.model, [width] * max(1, len(self.taps)))

    def proposer(self, model: RunnableModel, table: RowTable, caches: list[Tensor]) -> Proposer:
        runner = RowEagleRunner(self._device, self._runnable, table, caches, self.taps)
        return EagleProposer(self._max_drafts, runner, self._config.draft_tree)

    def costs(self, num_groups: int) -> StepCosts:
        timed = TimedHead(self._runnable, self.model.num_hidden, max(_SIZES))
        return StepCosts(self._device.meter(timed, self.model.cache_layers, num_groups).step_seconds(_SIZES, 0.05))


class RowEagleRunner(EagleRunner):
    """Runs a head on the rows of a table."""

    def __init__(
        self, device: Device, head: RunnableHead, table: RowTable, caches: list[Tensor], taps: Sequence[int]
    ) -> None:
        self.taps = taps
        self._device, self._head, self._table, self._caches = device, head, table, caches
        self._rounds = head.rounds(caches) if isinstance(head, CompiledEagle) else None

    def num_slots(self, row: DraftedSequence) -> int:
        return self._table.num_slots(row.sequence_id)

    def fuse(self, hidden: Tensor, taps: Sequence[Tensor]) -> Tensor:
        return self._head.fuse(taps or [hidden])

    def read(self, rows: Sequence[DraftedSequence], starts: Ints, counts: Ints, hidden: Tensor | None = None) -> None:
        assert hidden is not None, "a head reads hidden states"
        self._run(rows, starts, counts, hidden)

    def draft(self, orders: Sequence[Order], hidden: Sequence[Tensor] = ()) -> list[list[int]]:
        if self._rounds is not None and self._table.tree is None:
            return draft_natively(self._rounds, self._table, orders, hidden)
        before = torch.cat(list(hidden))
        if self._table.tree is not None:
            return self._grow(self._table.tree.tree, orders, before)

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

    def _grow(self, shape: DraftTree, orders: Sequence[Order], hidden: Tensor) -> list[list[int]]:
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
                return [trees.drafts(i) for i in range(len(orders))]
            for i in trees.growing:
                orders[i].row.tokens.set_drafts(trees.drafts(i))
            rows = [self._table[orders[i].row.sequence_id] for i in trees.growing]
            stops = [orders[i].stop for i in trees.growing]
            nodes = gather_nodes(rows, stops, [0] * len(rows), trees.levels, self._table)
            hidden = self._compute(nodes, self._device.take_rows(hidden, parents))

    def _compute(self, batch: StepBatch, hidden: Tensor) -> Tensor:
        """[T, H]."""
        input_ids, step = self._device.upload(batch.arrays, self._caches)
        return self._head(input_ids, hidden, step)

    def _run(self, rows: Sequence[DraftedSequence], starts: Ints, counts: Ints, hidden: Tensor) -> Tensor:
        """What the head makes of the last token of each, [R, H]."""
        batch = gather_tokens([self._table[row.sequence_id] for row in rows], starts, counts, self._table)
        return self._device.take_rows(self._compute(batch, hidden), [end - 1 for end in batch.ends])
