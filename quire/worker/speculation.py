"""The runner's dealings with what drafts: which steps and sequences it sees, what rows get of it, what all that takes.

The model runner has one where tokens are drafted, and tells it of each step as that goes on, one step after another.
How drafts are made, and how many pay, is for the proposer and the pace to say.
"""

from collections.abc import Sequence

from torch import Tensor

from quire.attention.step import Taps
from quire.protocol.step import StepPlan
from quire.sampling.lanes import Lane
from quire.sampling.tokens import NO_DRAFT
from quire.speculative.base import ComputedSpan, DraftedSequence, Proposer
from quire.speculative.pace import Pace
from quire.worker.devices.base import Device
from quire.worker.gather import StepBatch
from quire.worker.judging import Judge
from quire.worker.rows import Row


class Speculation:
    """A proposer, and the drafts of a worker's rows. Times are in seconds.

    Attributes:
        proposer: drafts tokens.
        pace: says how many there are to be, where that is left to it.
        judge: draws, where drafts are accepted by a rule.
    """

    pace: Pace | None = None

    def __init__(self, device: Device, proposer: Proposer, judge: Judge | None = None) -> None:
        self.proposer, self.judge, self._device = proposer, judge, device
        self._known_seconds = 0.0  # when the last step began, and what it took as far as the pace knows; else 0
        self._num_drafted = 0  # rows that got drafts in it

    def now(self) -> float:
        """The time, where there is a pace to learn from it."""
        return self._device.clock() if self.pace is not None else 0.0

    def adopt(self, row: Row, token_ids: Sequence[int]) -> None:
        """Draft for a sequence that has got its row and its sampling state.

        `token_ids`: drafts of which its preemption has bereft it; it gets them back where they are of use.
        """
        shares, greedy = row.request.cache_salt is None, row.state is not None and row.state.greedy
        row.drafted = DraftedSequence(row.sequence_id, row.tokens, row.state, shares, greedy)
        if token_ids and self.judge is not None and self.judge.restores:
            row.tokens.set_drafts(token_ids)
        if self.pace is not None:
            self.pace.wake()

    # A step, from its beginning to the drafts that come of it.

    def begin(self, plan: StepPlan, batch: StepBatch, start: float, has_waited: bool) -> Taps | None:
        """Look at a step that began at `start`; returns what the outputs of layers go to, if the proposer reads any.

        `has_waited`: for the stages before, whose time is none of this one's.
        """
        pace, proposer, num_rows = self.pace, self.proposer, len(batch.rows)
        self._plan, self._batch = plan, batch
        self._computing = self._reading = 0.0  # what the model takes, where it is timed, and the proposer's look at it
        self._is_resting = self._is_timed = False  # nobody is to have drafts after it; what it takes is to be learnt
        self._is_read = proposer.reads_all and num_rows < proposer.max_batch  # the proposer is to see all of it
        if pace is not None:
            if self._known_seconds and not (plan.new_sequences or plan.removed_sequence_ids):
                pace.learn_host(start - self._known_seconds, self._num_drafted)
            self._known_seconds = 0.0
            self._is_resting = pace.rests(num_rows)
            self._is_read = self._is_read and pace.must_know(num_rows)
            self._is_timed = pace.is_told(self._is_resting, self._is_read, batch.ends[-1] > num_rows)
        self._start = self._device.clock() if has_waited and self._is_timed else start
        self._taps = Taps(proposer.taps) if self._is_read and proposer.taps else None
        return self._taps

    def computed(self) -> None:
        """The model has made the hidden states."""
        if self._is_timed:
            self._computing = self._device.clock() - self._start

    def read(self, hidden: Tensor) -> None:
        """Hand the proposer the hidden states [T, H], if it is to see them, of the sequences that it drafts for."""
        if not self._is_read:
            return
        start, batch = self._device.clock(), self._batch
        spans = [
            ComputedSpan(row.drafted, row.num_computed, end - one.num_new_tokens, one.num_new_tokens, one.num_drafts)
            for row, end, one in zip(batch.rows, batch.ends, self._plan.scheduled, strict=True)
            if row.drafted is not None
        ]
        if spans:
            self.proposer.read(spans, hidden, self._taps.hidden if self._taps is not None else ())
        self._taps = None  # a large step's are large
        self._reading = self._device.clock() - start

    def sampled(self, num_tokens: int, start: float) -> None:
        """So many of the step's tokens were sampled, which began at `start`."""
        if self.pace is not None and self._computing and num_tokens == self._batch.ends[-1]:
            seconds = self._computing + self._device.clock() - start
            self.pace.learn(num_tokens, seconds)
            self._known_seconds, self._num_drafted = self._start + seconds + self._reading, 0

    def propose(self, lanes: dict[int, Lane], hidden: Tensor) -> dict[int, list[int]]:
        """Drafts by place in the plan, which the rows then hold; `hidden` are the rows that logits were made of."""
        found: dict[int, list[int]] = {}
        if self._is_resting:
            return found
        num_rows, pace, proposer = len(self._batch.rows), self.pace, self.proposer
        if not (asked := self._observe(lanes, found)) or num_rows >= proposer.max_batch:
            return found
        if pace is not None:
            if not pace.choose([*asked.values()], num_rows, proposer.max_drafts, proposer):
                if found or len(lanes) < num_rows:  # the next step will not be one like this
                    pace.wake()
                return found
            asked = {place: drafted for place, drafted in asked.items() if drafted.max_drafts}
        if proposer.uses_hidden:
            hidden = self._device.take_rows(hidden, [lanes[place].last_row for place in asked])
        for (place, drafted), drafts in zip(asked.items(), self._draft([*asked.values()], hidden), strict=True):
            if drafts:
                found[place] = list(drafts)
                if lanes[place].drafted is not None and self.judge is not None and self.judge.restores:
                    found[place].append(NO_DRAFT)  # however they are judged, the token after them is drawn
                drafted.num_before = drafted.tokens.num
                drafted.tokens.set_drafts(found[place])
        return found

    def _observe(self, lanes: dict[int, Lane], kept: dict[int, list[int]]) -> dict[int, DraftedSequence]:
        """Learn what became of drafts; returns who may have new ones, by place.

        `kept` gets those of an earlier step that are still to be judged.
        """
        free: dict[int, DraftedSequence] = {}
        for place, lane in lanes.items():
            if (drafted := self._batch.rows[place].drafted) is None:
                continue
            if self.pace is not None and lane.num_drafts and not self._plan.scheduled[place].draft_token_ids:
                self.pace.observe(drafted, lane.max_accepted, lane.num_drafts - lane.num_refused)  # not a grammar's
            if lane.failure is not None or lane.num_samples > 1:
                continue
            if drafted.tokens.num_drafts:
                kept[place] = drafted.tokens.drafts()
            else:
                drafted.max_drafts, free[place] = self.proposer.max_drafts, drafted
        return free

    def _draft(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        """What the proposer has for these, and what that takes."""
        pace, most = self.pace, self.proposer.max_drafts
        num_read = 0 if pace is None else sum([self.proposer.num_behind(row) for row in rows])
        start = self.now()
        proposed = self.proposer.propose(rows, hidden)
        seconds, counts = self.now() - start, [len(drafts) for drafts in proposed]
        assert max(counts, default=0) <= most, f"{max(counts)} drafts, at most {most} are allowed"
        if pace is not None:
            pace.drafted(counts, num_read, seconds)
            if self._known_seconds:  # what it reads for its drafts, they must pay for
                self._known_seconds, self._num_drafted = self._known_seconds + seconds - self._reading, len(rows)
        return proposed
