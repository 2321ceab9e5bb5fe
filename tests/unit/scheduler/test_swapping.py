"""Copying or computing again: the cheaper one by the prices that the scheduler was told."""

from quire.config.scheduler import SchedulerConfig
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import SequenceResult, StepPlan, StepResult
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler


class Narrow:
    """A scheduler in which two requests of 40 tokens fit and soon must not; a block takes a second each way."""

    def __init__(self, num_host: int = 100) -> None:
        layout = CacheLayout(
            block_size=4,
            groups=[CacheGroup([0])],
            num_blocks=[21],
            max_model_len=80,
            num_host_blocks=[num_host],
            block_bytes=[100],
            copy_bytes_per_second=100.0,
        )
        self.kv = KVManager(layout, enable_prefix_caching=False)
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=80), self.kv)
        self.now = 0.0
        self.out: list[int] = []  # blocks that went to the host, by step
        self.back: list[int] = []
        for i in range(2):
            task = SamplingTask(params=SamplingParams(), max_tokens=30, stop_token_ids=frozenset(), seed=1)
            request = NewRequest(request_id=str(i), prompt_token_ids=[i * 50 + j for j in range(40)], task=task)
            self.scheduler.add(request, 0.0)

    def run(self, seconds_per_token: float) -> None:
        """Until both have ended, each step as long as its tokens take."""
        while self.scheduler.has_unfinished():
            plan = self.scheduler.schedule(self.now)
            assert isinstance(plan, StepPlan), "both pools are full, and nothing goes on"
            self.now += plan.num_tokens * seconds_per_token
            self.out.append(len(plan.moves.out))
            self.back.append(len(plan.moves.in_))
            results = [SequenceResult([7]) for _ in plan.scheduled]
            self.scheduler.update(plan, StepResult(step_id=plan.step_id, results=results), self.now)
        self.scheduler.check_integrity()

    @property
    def num_swaps(self) -> int:
        tiers = self.scheduler.stats().tiers
        assert tiers is not None
        return tiers.num_swaps_total


def test_what_is_dear_to_compute_is_copied() -> None:
    # Some ten blocks take two seconds each, there and back; some 40 tokens a second each.
    narrow = Narrow()
    narrow.run(seconds_per_token=1.0)
    assert narrow.num_swaps == narrow.scheduler.stats().num_preemptions_total == 1
    assert sum(narrow.out) == sum(narrow.back) == 10


def test_what_is_dear_to_copy_is_computed_again() -> None:
    narrow = Narrow()
    narrow.run(seconds_per_token=0.1)
    assert narrow.num_swaps == 0
    assert narrow.scheduler.stats().num_preemptions_total == 1
    assert sum(narrow.out) == 0


def test_both_pools_full_is_no_deadlock() -> None:
    narrow = Narrow(num_host=3)
    narrow.run(seconds_per_token=1.0)
    assert narrow.num_swaps == 0
    assert narrow.scheduler.stats().num_preemptions_total == 1
