"""An EAGLE head beside the model: built, filled, and run on the rows' tokens and blocks.

The worker makes one where the configuration names a head. Its layer comes after the model's in the same KV groups, so
that blocks are shared, copied and swapped with theirs. It knows rows, and no plan.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.worker import WorkerConfig
from quire.models.builder import BuildContext, Builder
from quire.models.causal_lm import CausalLM
from quire.models.compiled_eagle import CompiledEagle
from quire.models.eagle import EagleHead, RunnableHead, TimedHead
from quire.models.eagle_config import LEFT, check_eagle_head, eagle_taps, our_name
from quire.models.weights import CheckpointFormat, weight_slots
from quire.protocol.cache import LayerCache, group_layers
from quire.protocol.requests import SamplingTask
from quire.sampling.native import fixed_record
from quire.speculative.base import DraftedSequence
from quire.speculative.drawing import Drawing
from quire.speculative.eagle import EagleOrder, EagleRunner
from quire.speculative.pace import StepCosts
from quire.worker.devices.base import Device
from quire.worker.gather import gather_tokens
from quire.worker.heads import fill_heads, open_heads
from quire.worker.rows import Row, RowTable
from quire.worker.weights.store import WeightStore

_SIZES = [1, 4, 16, 64]  # tokens of the steps that are timed


class EagleModel:
    """The EAGLE head of a configuration that names one; `load` fills it.

    Attributes:
        taps: the model's layers whose outputs it reads; none for the last hidden state alone.
    """

    def __init__(self, config: WorkerConfig, device: Device, model: CausalLM) -> None:
        assert config.draft is not None, "no head is configured"
        assert config.speculative is not None, "a head, and nothing that uses it"
        self._config, self._device, self._model = config, device, model
        draft, speculative = config.draft, config.speculative
        check_eagle_head(draft, config.model)
        self._checkpoint = open_heads(draft.path, draft.model, load_format=config.load_format)
        self._names = {name: our_name(name) for name in self._checkpoint.shapes}
        self.store = WeightStore(None) if device.packs_weights else None
        formats = device.weight_formats(speculative.quantization, self.store)
        builder = Builder(BuildContext(device.backend, formats, model.dtype))
        taps = eagle_taps(draft, config.model) if speculative.method == "eagle3" else None
        self.model = EagleHead(draft, builder, model, set(self._names.values()), taps)
        self.taps = self.model.layers_read
        layers = [*model.cache_layers, *self.model.cache_layers]
        model.assign_groups(layers, 0)
        builder.context.assign_groups(layers, len(model.cache_layers))
        self._runnable: RunnableHead = self.model  # until it is loaded

    def load(self, progress: bool) -> None:
        """Fill it with its weights (ModelLoadError where they are missing, broken, or of another model)."""
        own = weight_slots(self.model, CheckpointFormat())
        known = {theirs: ours for theirs, ours in self._names.items() if ours in own or ours.endswith(LEFT)}
        names = {theirs: ours if ours in own else None for theirs, ours in known.items()}
        fill_heads(self.model, self._checkpoint, names, self.model.dtype, self._config.model.seed)
        if self.store is not None:
            self.store.finish()
        width = self._model.embedding.shape.in_features
        self._runnable = self._device.compile_head(self.model, [width] * max(1, len(self.taps)))

    def runner(self, table: RowTable, caches: list[Tensor]) -> "RowEagleRunner":
        """What drafts for the rows; `caches` are those of the head's own layers."""
        return RowEagleRunner(self._device, self._runnable, table, caches, self.taps)

    def costs(self, layers: list[LayerCache]) -> StepCosts:
        """Of its steps, measured; `layers` are those of the model and of the head."""
        timed, num_groups = TimedHead(self._runnable, self.model.num_hidden, max(_SIZES)), len(group_layers(layers))
        return StepCosts(self._device.step_seconds(timed, self.model.cache_layers, _SIZES, 0.05, num_groups))


class RowEagleRunner(EagleRunner):
    """Runs a head on the rows of a table."""

    def __init__(
        self, device: Device, head: RunnableHead, table: RowTable, caches: list[Tensor], taps: Sequence[int]
    ) -> None:
        self.taps = taps
        self._device, self._head, self._table, self._caches = device, head, table, caches
        self._rounds = head.rounds(caches) if isinstance(head, CompiledEagle) else None

    def open(self, row: DraftedSequence) -> tuple[Row, Drawing]:
        held = self._table[row.sequence_id]
        task = held.request.task
        assert isinstance(task, SamplingTask)
        return held, Drawing(task.params, task.seed, held.sequence_index)

    def num_slots(self, own: Row) -> int:
        return min(own.num_blocks) * self._table.block_size

    def fuse(self, hidden: Tensor, taps: Sequence[Tensor]) -> Tensor:
        return self._head.fuse(taps or [hidden])

    def read(self, several: Sequence[Row], starts: Sequence[int], counts: Sequence[int], hidden: Tensor) -> None:
        self._run(several, starts, counts, hidden)

    def draft(self, orders: Sequence[EagleOrder], hidden: Sequence[Tensor]) -> list[list[int]]:
        if self._rounds is None:
            return self._draft_in_steps(orders, torch.cat(list(hidden)))
        rows: list[int] = []
        for order in orders:
            rows += order.own.index, order.start, order.stop, order.num_drafts, order.state.position
        records = b"".join(fixed_record(order.state) for order in orders)
        num_tokens, most = sum(order.stop - order.start for order in orders), orders[0].num_drafts
        table = self._table
        found = self._rounds.draw(
            rows, records, num_tokens, (table.token_ids, table.block_tables), table.block_size, hidden
        )
        drafts = [found[at * most : at * most + order.num_drafts] for at, order in enumerate(orders)]
        return [drawn[: drawn.index(-1)] if -1 in drawn else drawn for drawn in drafts]

    def _draft_in_steps(self, orders: Sequence[EagleOrder], hidden: Tensor) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in orders]
        drafting = list(range(len(orders)))
        starts, counts = [order.start for order in orders], [order.stop - order.start for order in orders]
        num_drawn = 0
        while drafting:
            several = [orders[i] for i in drafting]
            hidden = self._run([order.own for order in several], starts, counts, hidden)
            logits = self._head.spread(self._head.compute_logits(hidden))
            drawn = self._device.draw_ahead(logits, [order.state for order in several], num_drawn)
            num_drawn += 1
            going_on: list[int] = []
            for at, (order, token_id) in enumerate(zip(several, drawn, strict=True)):
                if token_id is not None:
                    own = drafts[drafting[at]]
                    own.append(token_id)
                    if num_drawn < order.num_drafts:
                        order.own.tokens.set_drafts(own)
                        going_on.append(at)
            hidden = self._device.take_rows(hidden, going_on)
            drafting = [drafting[at] for at in going_on]
            starts, counts = [orders[i].stop + num_drawn - 1 for i in drafting], [1] * len(drafting)
        return drafts

    def _run(self, rows: Sequence[Row], starts: Sequence[int], counts: Sequence[int], hidden: Tensor) -> Tensor:
        """What the head makes of the last token of each, [R, H]."""
        batch = gather_tokens(list(rows), starts, counts, self._table)
        input_ids, step = self._device.upload(batch.arrays, self._caches)
        return self._device.take_rows(self._head(input_ids, hidden, step), [end - 1 for end in batch.ends])
