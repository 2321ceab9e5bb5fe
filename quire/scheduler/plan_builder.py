"""A step plan in the making.

`Scheduler.schedule` fills one per step. A sequence that is preempted while the plan is made leaves it as if it had
never been in. It knows nothing of why a sequence was chosen.
"""

from quire.protocol.step import BlockCopy, NewSequence, ScheduledSequence, StepPlan
from quire.scheduler.sequence import Sequence


class PlanBuilder:
    """The parts of a plan, and the tokens that may still be added to it."""

    __slots__ = ("budget", "new_sequences", "scheduled")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.new_sequences: list[NewSequence] = []
        self.scheduled: list[ScheduledSequence] = []

    def add(self, sequence: Sequence, num_new_tokens: int, new_block_ids: list[int]) -> None:
        """Schedule tokens of a sequence whose block table covers them, and announce it if it is new to the runner."""
        if not sequence.announced:
            sequence.announced = True
            self.new_sequences.append(sequence.announcement())
            new_block_ids = []
        self.scheduled.append(
            ScheduledSequence(sequence.sequence_id, num_new_tokens, sequence.num_samples(num_new_tokens), new_block_ids)
        )
        self.budget -= num_new_tokens

    def drop(self, sequence: Sequence) -> None:
        """Take a preempted sequence out, and its tokens back; it is no longer announced if it was so in this plan."""
        sequence_id = sequence.sequence_id
        if any(new.sequence_id == sequence_id for new in self.new_sequences):
            self.new_sequences = [new for new in self.new_sequences if new.sequence_id != sequence_id]
            sequence.announced = False
        for place, item in enumerate(self.scheduled):
            if item.sequence_id == sequence_id:
                self.budget += item.num_new_tokens
                del self.scheduled[place]
                break

    def plan(self, step_id: int, removed_sequence_ids: list[int], copies: list[BlockCopy]) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step_id=step_id,
            removed_sequence_ids=removed_sequence_ids,
            new_sequences=self.new_sequences,
            copies=copies,
            scheduled=self.scheduled,
        )
