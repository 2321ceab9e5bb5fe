"""Whether a preempted sequence's blocks go to the host, or its tokens are computed again: what is faster.

The planner asks at each preemption. Times come in as numbers: there is no clock here, so that a simulation decides the
same each time.
"""

from quire.kvcache.manager import KVManager
from quire.protocol.step import StepPlan
from quire.scheduler.sequence import Sequence

MEASURED_TOKENS = 32  # of prompts in a step, from which on its time says what a token costs to compute again


class Swapping:
    """The prices of copying and computing.

    Attributes:
        seconds_per_token: what it takes to compute a token of a prompt; 0.0: not measured yet.
    """

    def __init__(self, kv: KVManager) -> None:
        self.seconds_per_token = 0.0
        self._kv = kv

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """A plan was carried out in so long a time; mostly of prompts, it tells what computing costs."""
        num_tokens = plan.num_tokens
        if num_tokens - len(plan.scheduled) >= MEASURED_TOKENS:
            measured, known = seconds / num_tokens, self.seconds_per_token
            self.seconds_per_token = 0.8 * known + 0.2 * measured if known else measured

    def try_swap(self, sequence: Sequence) -> None:
        """Have the host keep a running sequence's blocks, which it is about to lose, if that pays and there is room.

        Where one of the prices is not known, copying is taken for the cheaper.
        """
        space, num_computed = self._kv.space, sequence.num_computed_tokens
        seconds = num_computed * self.seconds_per_token
        if space is not None and (not seconds or space.seconds(sequence.table) < seconds):
            self._kv.swap_out(sequence.table, num_computed)
