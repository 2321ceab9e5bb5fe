"""A draft model beside the model: built, loaded, and run on the rows' tokens and blocks.

The worker makes one where the configuration names a draft model. Its layers come after the model's in the same KV
groups, so that blocks are shared, copied and swapped with theirs. It knows rows, and no plan.
"""

from collections.abc import Sequence

from torch import Tensor

from quire.config.worker import WorkerConfig
from quire.models.causal_lm import RunnableModel
from quire.models.compiled import CompiledModel
from quire.models.registry import CausalLM
from quire.sampling.accept import draw_drafts
from quire.sampling.waves import sample_ahead
from quire.speculative.base import DraftedSequence, Proposer
from quire.speculative.draft_model import DraftModelProposer
from quire.speculative.drawing import DraftRunner, Ints, Order
from quire.speculative.pace import StepCosts
from quire.worker.devices.base import Device
from quire.worker.drafting import Drafter, draft_in_steps, draft_natively
from quire.worker.gather import gather_tokens
from quire.worker.rows import RowTable
from quire.worker.weights.build import build_packed
from quire.worker.weights.load import load_model_weights


class DraftModel(Drafter):
    """The draft model of a configuration that names one; `load` fills it."""

    def __init__(self, config: WorkerConfig, device: Device, model: CausalLM) -> None:
        assert config.draft is not None, "no draft model is configured"
        assert config.speculative is not None, "a draft model, and nothing that uses it"
        self._config, self._draft, self._device = config, config.draft, device
        self._speculative = config.speculative
        self.model, self.store = build_packed(config, config.draft, config.speculative.quantization, device, False)
        self.module, self.layers = self.model, self.model.cache_layers
        self.assign_groups = self.model.assign_groups
        self._runnable: RunnableModel = self.model  # until it is loaded

    def load(self, progress: bool) -> None:
        """Fill it with its weights (ModelLoadError where they are missing or broken)."""
        load_model_weights(self.model, self._draft, load_format=self._config.load_format, progress=progress)
        self.store.finish()
        self._runnable = self._device.compile(self.model)

    def proposer(self, model: RunnableModel, table: RowTable, caches: list[Tensor]) -> Proposer:
        draws_apart = self._speculative.acceptance == "rejection"
        runner = RowDraftRunner(self._device, self._runnable, table, caches, draws_apart)
        return DraftModelProposer(self._speculative, runner, self._config.max_num_batched_tokens)

    def costs(self, num_groups: int) -> StepCosts:
        meter = self._device.meter(self._runnable, self.model.cache_layers, num_groups)
        return StepCosts(meter.step_seconds([1, 4, 16, 64], 0.05))


class RowDraftRunner(DraftRunner):
    """Runs a draft model on the rows of a table: natively where the model is kernels alone, else step by step.

    Args:
        draws_apart: drafts have random bits of their own, and what they were drawn from is kept.
    """

    def __init__(
        self, device: Device, model: RunnableModel, table: RowTable, caches: list[Tensor], draws_apart: bool
    ) -> None:
        self._draws_apart = draws_apart
        self._device, self._model, self._table, self._caches = device, model, table, caches
        self._rounds = model.rounds(caches) if isinstance(model, CompiledModel) else None

    def num_slots(self, row: DraftedSequence) -> int:
        return self._table.num_slots(row.sequence_id)

    def read(self, rows: Sequence[DraftedSequence], starts: Ints, counts: Ints, hidden: Tensor | None = None) -> None:
        self._compute(rows, starts, counts)

    def draft(self, orders: Sequence[Order], hidden: Sequence[Tensor] = ()) -> list[list[int]]:
        if self._rounds is None or (self._draws_apart and not all(order.state.greedy for order in orders)):
            return draft_in_steps(orders, self._draw)
        return draft_natively(self._rounds, self._table, orders)

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

    def _compute(self, rows: Sequence[DraftedSequence], starts: Ints, counts: Ints) -> Tensor:
        """The hidden state of the last token of each, [R, H]."""
        batch = gather_tokens([self._table[row.sequence_id] for row in rows], starts, counts, self._table)
        hidden = self._model(*self._device.upload(batch.arrays, self._caches))
        return self._device.take_rows(hidden, [end - 1 for end in batch.ends])
