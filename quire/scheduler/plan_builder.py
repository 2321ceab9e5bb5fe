"""A step plan in the making.

The planner fills one per step. A sequence that is preempted while the plan is made leaves it as if it had never been
in. It knows nothing of why a sequence was chosen.
"""

from quire.kvcache.table import NOTHING_APPENDED, Appended
from quire.protocol.requests import NewRequest
from quire.protocol.step import NewSequence, Sampling, ScheduledSequence
from quire.scheduler.sequence import Sequence

_DRAW = Sampling.DRAW
_NONE = Sampling.NONE


class PlanBuilder:
    """The parts of a plan, and the tokens that may still be added to it.

    `foresees`: a sequence's next token may be planned before the last one is known.
    """

    def __init__(self, budget: int, foresees: bool = True) -> None:
        self.budget = budget
        self._foresees = foresees
        self.new_requests: list[NewRequest] = []
        self.new_sequences: list[NewSequence] = []
        self.scheduled: list[ScheduledSequence] = []
        self.sequences: list[Sequence] = []  # those of `scheduled`

    def add(self, sequence: Sequence, num_new_tokens: int, appended: Appended, num_drafts: int = 0) -> None:
        """Schedule tokens of a sequence whose block table covers them, the last `num_drafts` of them drafts.

        Its request and itself are announced where the worker does not know them.
        """
        if not sequence.announced:
            self._announce(sequence)
            appended = NOTHING_APPENDED
        sampling, num_samples = _NONE, 1
        sequence.num_scheduled = stop = sequence.num_scheduled + num_new_tokens
        sequence.num_in_flight += 1
        if stop >= sequence.num_expected:
            sampling, num_samples = sequence.sampling, sequence.num_samples
            # What can be told without the result: one more token, unless that is the last there may be.
            goes_on = sequence.draws_one and not num_drafts and not sequence.proposes and stop + 1 < sequence.limit
            if goes_on and self._foresees:
                sequence.num_expected = stop + 1
        self.sequences.append(sequence)
        own_id, drafts = sequence.sequence_id, sequence.draft_token_ids[:num_drafts] if sequence.forces else []
        chosen, sequence.chosen_token_id = sequence.chosen_token_id, -1
        item = ScheduledSequence(own_id, num_new_tokens, sampling, num_samples, *appended, num_drafts, drafts, chosen)
        self.scheduled.append(item)
        self.budget -= num_new_tokens

    def add_next(self, sequence: Sequence, start: int, appended: Appended) -> None:
        """As `add`, of the one token at `start` that a running sequence is to compute: most of what is planned."""
        if not sequence.draws_one:
            self.add(sequence, 1, appended)
            return
        sequence.num_scheduled = stop = start + 1
        sequence.num_in_flight += 1
        if stop + 1 < sequence.limit and not sequence.proposes and self._foresees:
            sequence.num_expected = stop + 1
        self.sequences.append(sequence)
        if appended is NOTHING_APPENDED:
            self.scheduled.append(sequence.next_step)
        else:
            self.scheduled.append(ScheduledSequence(sequence.sequence_id, 1, _DRAW, 1, *appended))
        self.budget -= 1

    def drop(self, sequence: Sequence) -> None:
        """Take a preempted sequence out, and its tokens back; it is no longer announced if it was so in this plan."""
        sequence_id = sequence.sequence_id
        num_new = len(self.new_sequences)
        self.new_sequences = [new for new in self.new_sequences if new.sequence_id != sequence_id]
        sequence.announced &= len(self.new_sequences) == num_new
        if sequence in self.sequences:
            place = self.sequences.index(sequence)
            self.budget += self.scheduled.pop(place).num_new_tokens
            sequence.num_in_flight -= 1
            del self.sequences[place]

    def _announce(self, sequence: Sequence) -> None:
        if not sequence.group.announced:
            self.new_requests.append(sequence.group.request)
        sequence.announced = sequence.group.announced = True
        # The announcement has all tokens.
        sequence.chosen_token_id = -1
        self.new_sequences.append(sequence.announcement())
