"""Steps whose tokens a device draws before the host has heard of the last ones.

The model runner has one on a device that draws where logits are. A step goes ahead where nothing that it samples needs
the host (grammars, several samples, ranking, processors do); until the host has heard of a token its row has its own
name there, -1 - index. What can't go ahead is drawn when the step is finished, still on the device as far as that can.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.attention.step import AdapterBatch
from quire.models.causal_lm import RunnableModel
from quire.protocol.requests import SamplingTask
from quire.protocol.step import Sampling, SequenceResult, StepPlan, StepResult
from quire.sampling.lanes import Lane
from quire.sampling.sampler import SamplerOutput
from quire.sampling.waves import draw_lanes
from quire.worker.devices.base import Device, RowSampler
from quire.worker.gather import StepBatch
from quire.worker.rows import Row, RowTable


class _Ahead(NamedTuple):
    plan: StepPlan
    rows: list[Row]  # of the sequences that are sampled
    places: list[int]  # theirs in the plan
    drawn: Callable[[], SamplerOutput] | None  # waits for it


class Ahead:
    """The steps under way, the oldest first.

    Args:
        model: makes the logits.
        sampler: draws, for the rows of the table.
    """

    def __init__(self, device: Device, model: RunnableModel, table: RowTable, sampler: RowSampler) -> None:
        self._device, self._model, self._table, self._sampler = device, model, table, sampler
        self.steps: deque[_Ahead] = deque()

    def adopt(self, row: Row, task: SamplingTask) -> None:
        """A sequence has this row and its sampling state."""
        if row.state is not None and row.failure is None and self._sampler.can_draw(row.state):
            row.draws_there, row.draws_ahead = True, not task.has_grammar
            self._sampler.assign(row.index, row.state)

    def begin(self, plan: StepPlan, batch: StepBatch, hidden: Tensor, adapters: AdapterBatch | None) -> bool:
        """Have the device draw what a computed step samples; False, and nothing done, where that needs the host.

        `adapters`: of the step's tokens.
        """
        if self._table.num_with_prompt_logprobs:
            return False
        draw, places = Sampling.DRAW, list[int]()
        for place, (row, one) in enumerate(zip(batch.rows, plan.scheduled, strict=True)):
            if one.sampling is draw and one.num_samples == 1 and row.draws_ahead:
                places.append(place)
            elif one.sampling:
                return False
        for row, one in zip(batch.rows, plan.scheduled, strict=True):
            row.num_computed += one.num_new_tokens
        rows, drawn = [batch.rows[place] for place in places], None
        if places:
            token_rows = [batch.ends[place] - 1 for place in places]
            chosen = self._device.take_rows(hidden, token_rows)
            logits = self._model.compute_logits(chosen, adapters and adapters.of(token_rows))
            indices, ends = [row.index for row in rows], [row.num_computed for row in rows]
            drawn = self._sampler.launch(logits, indices, [row.num_computed - row.tokens.num_prompt for row in rows])
            self._table.token_ids[indices, ends] = -1 - np.array(indices)  # their names, until `hear`
        self.steps.append(_Ahead(plan, rows, places, drawn))
        return True

    def hear(self) -> StepResult:
        """Wait for the oldest step, and take down what was drawn for the rows that are still there."""
        plan, rows, places, wait = self.steps.popleft()
        results, live = [SequenceResult()] * len(plan.scheduled), self._table.rows
        if wait is not None:
            drawn = wait()
            for row, place, token_ids, logprobs in zip(rows, places, drawn.token_ids, drawn.logprobs, strict=True):
                results[place] = SequenceResult(token_ids, logprobs)
                if token_ids and live.get(row.sequence_id) is row:
                    row.tokens.append(token_ids[0])
            for i, failure in drawn.failures.items():
                results[places[i]] = SequenceResult(failure=failure)
        return StepResult(step_id=plan.step_id, results=results)

    def draw(self, logits: Tensor, rows: Sequence[Row], lanes: Sequence[Lane]) -> None:
        """Draw what could not go ahead: what the device can there, and all else on the host."""
        own: list[tuple[Row, Lane]] = []
        others: list[tuple[Row, Lane]] = []
        for row, lane in zip(rows, lanes, strict=True):
            is_own = row.draws_there and lane.num_samples == 1 and not lane.num_drafts
            (own if is_own else others).append((row, lane))
        if own:
            chosen = self._device.take_rows(logits, [lane.first_row for _, lane in own])
            masks = [lane.masks.get(0) if lane.masks else None for _, lane in own]
            indices, positions = [row.index for row, _ in own], [row.tokens.position for row, _ in own]
            drawn = self._sampler.launch(chosen, indices, positions, masks)()
            for i, (row, lane) in enumerate(own):
                lane.token_ids, lane.logprobs = drawn.token_ids[i], drawn.logprobs[i]
                lane.failure = drawn.failures.get(i)
                row.append(lane.token_ids)
        draw_lanes(logits, [lane for _, lane in others], self._device.target)
        for row, _ in others:
            if row.draws_there and row.state is not None:
                self._sampler.assign(row.index, row.state)  # it has not counted these tokens
