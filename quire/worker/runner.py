"""The model runner: carries out one step plan on one device.

The worker calls `begin` and then `finish`: bring the rows up to date, gather the inputs, run the model; sample,
remember the new tokens, have more drafted. It keeps rows and KV tensors and knows nothing of queues, policies or text.
"""

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from quire.attention.step import AdapterBatch
from quire.distributed.links import AnyLink
from quire.models.causal_lm import RunnableModel
from quire.protocol.requests import PoolingTask, SamplingTask
from quire.protocol.step import (
    Failure,
    FailureKind,
    PromptLogprobs,
    SampleGuide,
    Sampling,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.sampling.lanes import Lane
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.native import SampleCall
from quire.sampling.sampler import rank
from quire.sampling.state import Mask, SamplingState, masks_of
from quire.sampling.waves import draw_lanes
from quire.sampling_params import SamplingParams
from quire.utils.logs import logger
from quire.worker.adapters import Adapters
from quire.worker.ahead import Ahead
from quire.worker.cache import KVCache
from quire.worker.devices.base import Device
from quire.worker.gather import StepBatch, gather
from quire.worker.judging import NO_HIDDEN
from quire.worker.rows import Row, RowTable
from quire.worker.speculation import Speculation

# Rows of logits held at once for prompt logprobs: 128 rows of a 152k vocabulary are 78 MB in fp32.
PROMPT_LOGPROBS_ROWS = 128
_NOTHING = SequenceResult()


@dataclass(slots=True)
class _Begun:
    """A plan that is computed and not yet sampled."""

    plan: StepPlan
    rows: list[Row]
    ends: list[int]  # in `hidden`, as StepBatch.ends
    hidden: Tensor  # [T, H], or of each sequence the last rows, which are sampled
    adapters: AdapterBatch | None = None  # of the tokens
    call: SampleCall | None = None  # draws each sequence's token, where nothing else is to be done


@dataclass(eq=False)
class ModelRunner:
    """Rows, KV cache and model of one worker.

    Attributes:
        device: where it computes.
        model: the loaded model, as the device runs it.
        cache: its KV cache.
        table: the persistent rows, empty.
        poison: debug aid: fill freshly assigned block space with NaN.
        classifies: the model's head is for classes, which a request that pools is given in place of a hidden state.
        speculation: what has to do with drafts, where tokens are drafted.
        adapters: those that rows run with, where the model has places for any.
        ahead: on a device that draws where logits are, what it does of that.
        before, after: links to the stages whose layers come before and after the model's, where it has not all.
        begun: the step that is begun and is to be sampled here.
    """

    device: Device
    model: RunnableModel
    cache: KVCache
    table: RowTable
    poison: bool = False
    classifies: bool = False
    speculation: Speculation | None = None
    adapters: Adapters | None = None
    ahead: Ahead | None = None
    before: AnyLink | None = None
    after: AnyLink | None = None
    begun: _Begun | None = None
    _passed: deque[StepPlan] = field(default_factory=deque)  # to be sampled by the last stage
    _masks: list[Mask] = field(default_factory=list)  # of the last guide: the next one's lie there too, as a rule

    def begin(self, plan: StepPlan) -> None:
        """Bring the rows up to date and compute the plan's tokens; `finish` comes next."""
        assert self.begun is None, "a step is begun and not finished"
        speculation = self.speculation
        start = speculation.now() if speculation is not None else 0.0
        self._update_rows(plan)
        if not plan.scheduled:
            self._pass_on(_Begun(plan, [], [], NO_HIDDEN))
            return
        batch = gather(plan.scheduled, self.table)
        input_ids, step = self.device.upload(batch.arrays, self.cache.tensors)
        adapters = None if self.adapters is None else self.adapters.batch(batch.rows, batch.ends)
        if adapters is not None:
            step = replace(step, adapters=adapters)
        if self.before is not None:
            step = replace(step, incoming=self.before.arrived(batch.ends[-1]))
        if speculation is not None:
            taps = speculation.begin(plan, batch, start, has_waited=self.before is not None)
            step = step if taps is None else replace(step, taps=taps)
        if self.after is not None:
            step = replace(step, outgoing=self.after.room(batch.ends[-1]))
        call = self._call_of_each(plan, batch.rows)  # while rows are in the caches
        ends, wanted = self._wanted(plan, batch)
        if wanted is not None:
            step = replace(step, wanted=wanted)
        hidden = self.model(input_ids, step)
        if self.ahead is not None and self.ahead.begin(plan, batch, hidden, adapters):
            return
        for link in (self.before, self.after):
            if link is not None:
                link.done()
        if speculation is not None:
            speculation.computed()
        if hidden.shape[0] != ends[-1]:  # the model has made all
            ends = batch.ends
        self._pass_on(_Begun(plan, batch.rows, ends, hidden, adapters, call))

    def _pass_on(self, begun: _Begun) -> None:
        """A step is computed: `finish` samples it here, or `take` hears what another stage has sampled."""
        if self.after is None:
            self.begun = begun
            return
        self._passed.append(begun.plan)
        for one, row in zip(begun.plan.scheduled, begun.rows, strict=True):
            row.num_computed += one.num_new_tokens

    def take(self, result: StepResult) -> None:
        """Let the rows of the oldest plan that was passed on have what was drawn for them."""
        plan = self._passed.popleft()
        assert plan.step_id == result.step_id, "another step's result"
        for one, found in zip(plan.scheduled, result.results, strict=True):
            row = self.table.rows.get(one.sequence_id)
            if row is None or one.sampling != Sampling.DRAW or found.failure is not None:
                continue
            if one.num_drafts:
                row.num_computed -= one.num_drafts + 1 - len(found.token_ids)
            row.tokens.set_drafts([])
            row.append(found.token_ids if one.num_samples == 1 else found.token_ids[:1])
            row.tokens.set_drafts(found.draft_token_ids)

    def finish(self, guide: SampleGuide | None = None) -> StepResult:
        """Sample the plan that was begun, under the masks of `guide`."""
        if self.ahead is not None and self.ahead.steps:
            return self.ahead.hear()
        assert self.begun is not None, "no step is begun"
        begun, self.begun = self.begun, None
        scheduled, rows = begun.plan.scheduled, begun.rows
        if guide is None and begun.call is not None and (drawn := self._draw_each(begun, begun.call)):
            return StepResult(step_id=begun.plan.step_id, results=[SequenceResult([token_id]) for token_id in drawn])
        results = [_NOTHING] * len(rows)
        if self.table.num_with_prompt_logprobs:
            self._prompt_logprobs(begun, results)
        if rows and self.speculation is not None:
            self.speculation.read(begun.hidden)
        for one, row in zip(scheduled, rows, strict=True):
            row.num_computed += one.num_new_tokens
        sampled = [place for place, one in enumerate(scheduled) if one.sampling]
        if sampled:
            self._sample(begun, sampled, guide, results)
        return StepResult(step_id=begun.plan.step_id, results=results)

    def reset(self, waiting: Iterable[StepPlan] = ()) -> None:
        """Forget all sequences and requests, and a step that was begun, whatever state they are in.

        `waiting`: plans that will not be begun; what another stage makes of them is let pass.
        """
        for plan in waiting:
            if plan.scheduled and self.before is not None:
                self.before.arrived(plan.num_tokens)
                self.before.done()
        self.begun = None
        if self.ahead is not None:
            self.ahead.steps.clear()
        self._passed.clear()
        self.table.clear()

    # ---- before the computation

    def _update_rows(self, plan: StepPlan) -> None:
        table = self.table
        for request in plan.new_requests:
            table.requests[request.request_id] = request
        for fork in plan.forks:
            self._give_state(table.fork(fork))
        for sequence_id in plan.removed_sequence_ids:
            row = table.rows.get(sequence_id)
            if row is not None and row.drafted is not None and self.speculation is not None:
                self.speculation.proposer.forget(row.drafted)
            table.remove(sequence_id)
        for sequence in plan.new_sequences:
            self._give_state(table.add(sequence), sequence.draft_token_ids)
        self.cache.carry_out(plan.moves)
        for scheduled in plan.scheduled:
            if scheduled.new_block_ids or scheduled.edits or scheduled.chosen_token_id >= 0 or scheduled.num_drafts:
                table.advance(scheduled)
        for request_id in plan.ended_request_ids:
            table.requests.pop(request_id, None)
        if self.poison:
            for sequence in plan.new_sequences:
                first_fresh = -(-sequence.num_computed_tokens // table.block_size)
                self.cache.poison([blocks[first_fresh:] for blocks in sequence.block_ids])
            for scheduled in plan.scheduled:
                self.cache.poison(scheduled.new_block_ids)

    def _give_state(self, row: Row, draft_token_ids: Sequence[int] = ()) -> None:
        """A sampling state; where that can't be made, a plain one in its place, and a failure when it is sampled."""
        task = row.request.task
        if isinstance(task, PoolingTask) or self.after is not None:
            return
        try:
            row.state = self._make_state(row, task, task.params)
        except Exception as error:
            logger.exception("request %a: its sampling parameters can't be used", row.request.request_id)
            row.failure = Failure(FailureKind.INTERNAL, f"{type(error).__name__} in its sampling parameters")
            row.state = self._make_state(row, task, SamplingParams())
        if self.ahead is not None:
            self.ahead.adopt(row, task)
        is_free = self.table.tree is None or not task.has_grammar  # masks are of chains
        if self.speculation is not None and task.params.speculative and is_free:
            self.speculation.adopt(row, draft_token_ids)

    def _make_state(self, row: Row, task: SamplingTask, params: SamplingParams) -> SamplingState:
        numbers = {"seed": task.seed, "sequence_index": row.sequence_index, "vocab_size": self.model.vocab_size}
        stops, words = task.stop_token_ids, task.bad_words_token_ids
        return SamplingState(params, row.tokens, stop_token_ids=stops, bad_words_token_ids=words, **numbers)

    def _wanted(self, plan: StepPlan, batch: StepBatch) -> tuple[list[int], Tensor | None]:
        """The rows of which hidden states are read, where those are the ones that are sampled; and their `ends`."""
        ends, is_read = batch.ends, self.speculation is not None and self.speculation.proposer.reads_all
        if ends[-1] == len(ends) or is_read or self.table.num_with_prompt_logprobs or batch.arrays.tails is not None:
            return ends, None
        counts = [one.num_drafts + 1 if one.sampling else 0 for one in plan.scheduled]
        rows = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        return ([*accumulate(counts)], torch.tensor(rows, dtype=torch.int32)) if len(rows) < ends[-1] else (ends, None)

    def _call_of_each(self, plan: StepPlan, rows: list[Row]) -> SampleCall | None:
        """What draws each sequence's token, where that is all, by parameters that are fixed: of most steps by far."""
        if self.speculation is not None or self.ahead is not None or self.table.num_with_prompt_logprobs:
            return None
        others = [s for s in plan.scheduled if s.sampling is not Sampling.DRAW or s.num_samples > 1 or s.num_drafts]
        return None if others else SampleCall.of_each([row.state for row in rows])

    # ---- after it

    def _draw_each(self, begun: _Begun, call: SampleCall) -> list[int]:
        """Each sequence's token, appended; [], and nothing is done, where one can't be drawn."""
        last = [end - 1 for end in begun.ends]
        hidden = self.device.take_rows(begun.hidden, last)
        logits = self.model.compute_logits(hidden, begun.adapters and begun.adapters.of(last)).cpu()
        drawn = [] if call.run(logits, self.device.target) else call.token_ids
        for row, one, token_id in zip(begun.rows, begun.plan.scheduled, drawn, strict=bool(drawn)):
            row.num_computed += one.num_new_tokens
            row.tokens.append(token_id)
        return drawn

    def _sample(
        self, begun: _Begun, sampled: list[int], guide: SampleGuide | None, results: list[SequenceResult]
    ) -> None:
        """Draw or rank at the last positions of the sequences at places `sampled`; fills in their results."""
        scheduled = begun.plan.scheduled
        token_rows: list[int] = []
        lanes: dict[int, Lane] = {}
        for place in sampled:
            row, one = begun.rows[place], scheduled[place]
            if row.failure is not None:
                results[place] = SequenceResult(failure=row.failure)
                continue
            end = begun.ends[place]
            if row.state is None:  # of a PoolingTask
                hidden = begun.hidden[end - 1 : end]
                if self.classifies:
                    hidden = self.model.compute_logits(hidden, begun.adapters and begun.adapters.of([end - 1]))
                results[place] = SequenceResult([0], pooled=hidden[0].tolist())
                continue
            lane = lanes[place] = Lane(row.state, len(token_rows), one.num_samples)
            if one.num_drafts:
                lane.num_drafts = one.num_drafts
                if self.table.tree is not None:
                    lane.use_tree(self.table.tree.tree)
            token_rows.extend(range(end - 1 - one.num_drafts, end))
        if not lanes:
            return
        speculation = self.speculation
        start = speculation.now() if speculation is not None else 0.0
        hidden = self.device.take_rows(begun.hidden, token_rows)
        logits = self.model.compute_logits(hidden, begun.adapters and begun.adapters.of(token_rows))
        if guide is not None:
            self._attach_masks(guide, lanes)
        ranked = {place: lanes.pop(place) for place in [*lanes] if scheduled[place].sampling is Sampling.RANK}
        if ranked:
            self._rank(logits, ranked, results)
        if self.ahead is not None:
            self.ahead.draw(logits, [begun.rows[place] for place in lanes], list(lanes.values()))
        elif speculation is None or speculation.judge is None:
            draw_lanes(logits, list(lanes.values()), self.device.target)
        else:
            speculation.judge.draw(logits, list(lanes.values()), [begun.rows[place] for place in lanes])
        if speculation is not None:
            speculation.sampled(len(token_rows), start)
        if self.table.tree is not None:
            self._move_paths(begun.rows, lanes)
        drafts = {} if speculation is None else speculation.propose(lanes, hidden)
        for place, lane in lanes.items():
            if lane.num_drafts:
                begun.rows[place].num_computed -= lane.num_refused
            if lane.failure is not None:
                results[place] = SequenceResult(failure=lane.failure, prompt_logprobs=results[place].prompt_logprobs)
            else:
                own, before = drafts.get(place, []), results[place].prompt_logprobs
                results[place] = SequenceResult(lane.token_ids, lane.logprobs, own, prompt_logprobs=before)

    def _attach_masks(self, guide: SampleGuide, lanes: dict[int, Lane]) -> None:
        """Give each lane its bitmasks, where they lie in the guide's memory."""
        masks, num = self._masks, len(guide.rows)
        if len(masks) < num or masks[0].address != ctypes.addressof(ctypes.c_char.from_buffer(guide.masks)):
            masks = self._masks = masks_of(np.frombuffer(guide.masks, np.uint32).reshape(num, -1))
        for mask, (place, position) in zip(masks, guide.rows, strict=False):
            if (lane := lanes.get(place)) is not None:
                lane.masks = {**(lane.masks or {}), position: mask}

    def _rank(self, logits: Tensor, lanes: dict[int, Lane], results: list[SequenceResult]) -> None:
        """Candidates by place in the plan."""
        several = list(lanes.values())
        for lane in several:
            lane.go_to(0)
        for (place, lane), found in zip(lanes.items(), rank(logits, several, self.device.target), strict=True):
            if isinstance(found, Failure):
                results[place] = SequenceResult(failure=found)
            else:
                top, row = lane.state.num_logprobs, logits[lane.first_row : lane.first_row + 1]
                # Of the best candidate, with as many of the likeliest tokens as the request wants to see.
                likeliest = prompt_logprobs(row, found.token_ids[:1], top, self.device.target) if top else None
                results[place] = SequenceResult(candidates=found, logprobs=likeliest)

    def _move_paths(self, rows: list[Row], lanes: dict[int, Lane]) -> None:
        """Let keys and values of trees' accepted drafts lie where a chain's would."""
        table, moves = self.table, list[tuple[int, int, int]]()
        for place, lane in lanes.items():
            row, base = rows[place], rows[place].num_computed - lane.num_drafts
            moves += [(row.index, base + node, base + to) for node, to in lane.moves]
        if moves:
            whose, sources, destinations = np.array(moves, np.int32).T
            self.cache.move_slots(table.slots(whose, sources), table.slots(whose, destinations), table.block_size)

    def _prompt_logprobs(self, begun: _Begun, results: list[SequenceResult]) -> None:
        """This step's share of the prompt logprobs: token p's row predicts prompt token p + 1."""
        for place, (row, one) in enumerate(zip(begun.rows, begun.plan.scheduled, strict=True)):
            top, start = row.prompt_logprobs, row.num_computed
            end = min(start + one.num_new_tokens, row.tokens.num_prompt - 1)
            if top is None or end <= start:
                continue
            first = begun.ends[place] - one.num_new_tokens - start  # hidden row of position p is first + p
            entries: list[TokenLogprobs] = []
            for low in range(start, end, PROMPT_LOGPROBS_ROWS):
                high = min(low + PROMPT_LOGPROBS_ROWS, end)
                adapters = begun.adapters and begun.adapters.of(range(first + low, first + high))
                logits = self.model.compute_logits(begun.hidden[first + low : first + high], adapters)
                targets = row.tokens.ids[low + 1 : high + 1].tolist()
                entries.extend(prompt_logprobs(logits, targets, top, self.device.target))
            results[place] = SequenceResult(prompt_logprobs=PromptLogprobs(start=start + 1, entries=entries))
