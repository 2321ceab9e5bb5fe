"""A draft model beside the model: built, loaded, and run on the rows' tokens and blocks.

The worker makes one where the configuration names a draft model. Its layers come after the model's in the same KV
groups, so that blocks are shared, copied and swapped with theirs. It knows rows, and no plan.
"""

from collections.abc import Sequence

from torch import Tensor

from quire.config.worker import WorkerConfig
from quire.models.compiled import CompiledModel
from quire.models.registry import CausalLM
from quire.protocol.cache import LayerCache, group_layers
from quire.protocol.requests import SamplingTask
from quire.sampling.native import fixed_record
from quire.sampling_params import SamplingParams
from quire.speculative.base import DraftedSequence
from quire.speculative.draft_model import DraftOrder, DraftRunner, Reader
from quire.speculative.pace import StepCosts
from quire.worker.devices.base import Device, RunnableModel
from quire.worker.gather import StepBatch, gather_tokens
from quire.worker.rows import Row, RowTable
from quire.worker.weights.build import build_packed
from quire.worker.weights.load import load_model_weights


class DraftModel:
    """The draft model of a configuration that names one; `load` fills it."""

    taps: Sequence[int] = ()  # as `quire.worker.eagle.EagleModel` has

    def __init__(self, config: WorkerConfig, device: Device, model: CausalLM) -> None:
        assert config.draft is not None, "no draft model is configured"
        assert config.speculative is not None, "a draft model, and nothing that uses it"
        self._config, self._draft, self._device = config, config.draft, device
        self.model, self.store = build_packed(config, config.draft, config.speculative.quantization, device)
        layers = [*model.cache_layers, *self.model.cache_layers]
        model.assign_groups(layers, 0)
        self.model.assign_groups(layers, len(model.cache_layers))
        self._runnable: RunnableModel = self.model  # until it is loaded

    def load(self, progress: bool) -> None:
        """Fill it with its weights (ModelLoadError where they are missing or broken)."""
        load_model_weights(self.model, self._draft, load_format=self._config.load_format, progress=progress)
        if self.store is not None:
            self.store.finish()
        self._runnable = self._device.compile(self.model)

    def runner(self, table: RowTable, caches: list[Tensor]) -> "RowDraftRunner":
        """What drafts for the rows; `caches` are those of the draft model's own layers."""
        runner = RowDraftRunner(self._device, self._runnable, table, caches, self._config.max_num_batched_tokens)
        speculative = self._config.speculative
        runner.draws_apart = speculative is not None and speculative.acceptance == "rejection"
        return runner

    def costs(self, layers: list[LayerCache]) -> StepCosts:
        """Of its steps, measured; `layers` are those of both models."""
        sizes, num_groups = [1, 4, 16, 64], len(group_layers(layers))
        seconds = self._device.step_seconds(self._runnable, self.model.cache_layers, sizes, 0.05, num_groups)
        return StepCosts(seconds)


class RowDraftRunner(DraftRunner):
    """Runs a draft model on the rows of a table: natively where the model is kernels alone, else step by step.

    Attributes:
        draws_apart: drafts have random bits of their own, and what they were drawn from is kept.
    """

    draws_apart = False

    def __init__(
        self, device: Device, model: RunnableModel, table: RowTable, caches: list[Tensor], max_tokens: int
    ) -> None:
        self.max_tokens = max_tokens
        self._device, self._model, self._table, self._caches = device, model, table, caches
        self._rounds = model.rounds(caches) if isinstance(model, CompiledModel) else None

    def open(self, row: DraftedSequence) -> tuple[Row, SamplingParams, int, int]:
        held = self._table[row.sequence_id]
        task = held.request.task
        assert isinstance(task, SamplingTask)
        return held, task.params, task.seed, held.sequence_index

    def num_slots(self, reader: Reader) -> int:
        return min(reader.row.num_blocks) * self._table.block_size

    def read(self, reader: Reader, start: int, count: int) -> None:
        self._compute([reader.row], [start], [count])

    def draft(self, orders: Sequence[DraftOrder]) -> list[list[int]]:
        if self._rounds is None or (self.draws_apart and not all(order.reader.state.greedy for order in orders)):
            return self._draft_in_steps(orders)
        rows: list[int] = []
        records: list[bytes] = []
        num_tokens, most = 0, orders[0].num_drafts
        for order in orders:
            reader, start, end = order.reader, order.start, order.num_tokens
            state = reader.state
            rows += reader.row.index, start, end, order.num_drafts, state.position
            records.append(fixed_record(state))
            num_tokens += end - start
        table = self._table
        tables = table.token_ids, table.block_tables
        found = self._rounds.draw(rows, b"".join(records), num_tokens, tables, table.block_size)
        drafts = [found[at * most : at * most + order.num_drafts] for at, order in enumerate(orders)]
        return drafts if -1 not in found else [drawn[: drawn.index(-1)] if -1 in drawn else drawn for drawn in drafts]

    def _draft_in_steps(self, orders: Sequence[DraftOrder]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in orders]
        drafting = list(range(len(orders)))
        starts, counts = [order.start for order in orders], [order.num_tokens - order.start for order in orders]
        num_drawn = 0
        while drafting:
            several = [orders[i] for i in drafting]
            batch, hidden = self._compute([order.reader.row for order in several], starts, counts)
            logits = self._model.compute_logits(self._device.take_rows(hidden, [end - 1 for end in batch.ends]))
            states = [order.reader.state for order in several]
            if self.draws_apart:
                drawn, probs = self._device.draw_drafts(logits, states, num_drawn)
                for order, drawn_from in zip(several, probs, strict=True):
                    order.probs += [drawn_from] if drawn_from is not None else []
            else:
                drawn = self._device.draw_ahead(logits, states, num_drawn)
            num_drawn += 1
            going_on: list[int] = []
            for i, token_id in zip(drafting, drawn, strict=True):
                if token_id is not None:
                    drafts[i].append(token_id)
                    if num_drawn < orders[i].num_drafts:
                        orders[i].reader.row.tokens.set_drafts(drafts[i])
                        going_on.append(i)
            drafting = going_on
            starts, counts = [orders[i].num_tokens + num_drawn - 1 for i in drafting], [1] * len(drafting)
        return drafts

    def _compute(self, rows: list[Row], starts: Sequence[int], counts: Sequence[int]) -> tuple[StepBatch, Tensor]:
        batch = gather_tokens(rows, starts, counts, self._table)
        return batch, self._model(*self._device.upload(batch.arrays, self._caches))
