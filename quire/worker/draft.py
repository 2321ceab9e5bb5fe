"""A draft model beside the model: built, loaded, and run on the rows' tokens and blocks.

The worker makes one where the configuration names a draft model. Its layers come after the model's in the same KV
groups, so that blocks are shared, copied and swapped with theirs. It knows rows, and no plan.
"""

from collections.abc import Sequence

from torch import Tensor

from quire.config.worker import WorkerConfig
from quire.models.registry import CausalLM, build_model
from quire.protocol.cache import LayerCache, group_layers
from quire.protocol.requests import SamplingTask
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.speculative.base import DraftedSequence
from quire.speculative.draft_model import DraftRunner
from quire.worker.devices.base import Device, RunnableModel
from quire.worker.gather import gather_tokens
from quire.worker.rows import RowTable
from quire.worker.weights.load import load_model_weights
from quire.worker.weights.store import WeightStore


class DraftModel:
    """The draft model of a configuration that names one; `load` fills it."""

    def __init__(self, config: WorkerConfig, device: Device, model: CausalLM) -> None:
        assert config.draft is not None, "no draft model is configured"
        assert config.speculative is not None, "a draft model, and nothing that uses it"
        self._config, self._draft, self._device = config, config.draft, device
        self._store = WeightStore(None) if device.packs_weights else None
        formats = device.weight_formats(config.speculative.quantization, self._store)
        self.model = build_model(config.draft, device.backend, formats)
        layers = [*model.cache_layers, *self.model.cache_layers]
        model.assign_groups(layers, 0)
        self.model.assign_groups(layers, len(model.cache_layers))
        self._runnable: RunnableModel = self.model  # until it is loaded

    def load(self, progress: bool) -> None:
        """Fill it with its weights (ModelLoadError where they are missing or broken)."""
        load_model_weights(self.model, self._draft, load_format=self._config.load_format, progress=progress)
        if self._store is not None:
            self._store.finish()
        self._runnable = self._device.compile(self.model)

    def runner(self, table: RowTable, caches: list[Tensor]) -> "RowDraftRunner":
        """What drafts for the rows; `caches` are those of the draft model's own layers."""
        return RowDraftRunner(self._device, self._runnable, table, caches, self._config.max_num_batched_tokens)

    def round_seconds(self, layers: list[LayerCache]) -> float:
        """How long one draft of a sequence takes, measured; `layers` are those of both models."""
        seconds = self._device.step_seconds(
            self._runnable, self.model.cache_layers, [1, 2], 0.1, len(group_layers(layers))
        )
        return seconds[1]


class RowDraftRunner(DraftRunner):
    """Runs a draft model on the rows of a table."""

    def __init__(
        self, device: Device, model: RunnableModel, table: RowTable, caches: list[Tensor], max_tokens: int
    ) -> None:
        self.max_tokens = max_tokens
        self._device, self._model, self._table, self._caches = device, model, table, caches

    def num_slots(self, row: DraftedSequence) -> int:
        return min(self._table[row.sequence_id].num_blocks) * self._table.block_size

    def run(self, rows: Sequence[DraftedSequence], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        batch = gather_tokens([self._table[row.sequence_id] for row in rows], starts, counts, self._table)
        input_ids, step = self._device.upload(batch.arrays, self._caches)
        hidden = self._model(input_ids, step)
        return self._model.compute_logits(self._device.take_rows(hidden, [end - 1 for end in batch.ends]))

    def draw(self, logits: Tensor, states: Sequence[SamplingState], ahead: int) -> list[int | None]:
        return self._device.draw_ahead(logits, states, ahead)

    def sampling(self, row: DraftedSequence) -> tuple[SamplingParams, int, int]:
        held = self._table[row.sequence_id]
        task = held.request.task
        assert isinstance(task, SamplingTask)
        return task.params, task.seed, held.sequence_index
