"""The simulated executor tells right from wrong: what it must refuse, and what a guide may forbid."""

import pytest
from simulated import FakeModel, SimulatedExecutor

from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import Moves, NewSequence, SampleGuide, Sampling, ScheduledSequence, StepPlan
from quire.protocol.worker import CallReply, CheckIntegrity
from quire.sampling_params import SamplingParams


def make_executor() -> SimulatedExecutor:
    executor = SimulatedExecutor(FakeModel())
    groups = [CacheGroup(layers=[0])]
    executor.initialize_cache(CacheLayout(block_size=4, groups=groups, num_blocks=[8], max_model_len=32))
    return executor


def first_plan(block_ids: list[int]) -> StepPlan:
    task = SamplingTask(params=SamplingParams(), max_tokens=9, stop_token_ids=frozenset(), seed=1)
    return StepPlan(
        step_id=0,
        removed_sequence_ids=[],
        ended_request_ids=[],
        new_requests=[NewRequest(request_id="a", prompt_token_ids=[1, 2, 3, 4, 5], task=task)],
        new_sequences=[NewSequence(0, "a", 0, [], [block_ids], 0)],
        forks=[],
        moves=Moves(),
        scheduled=[ScheduledSequence(0, 5, Sampling.DRAW)],
    )


def test_a_guide_says_which_tokens_may_be_drawn() -> None:
    for token_id in (0, 7, 39):
        executor = make_executor()
        executor.submit(first_plan([0, 1]))
        mask = (1 << token_id).to_bytes(8, "little")
        result = executor.collect(SampleGuide(step_id=0, masks=memoryview(mask), rows=[(0, 0)]))
        assert result.results[0].token_ids == [token_id]


def test_a_block_that_two_positions_share_is_seen() -> None:
    executor = make_executor()
    executor.submit(first_plan([3, 3]))
    with pytest.raises(AssertionError, match="handed out twice|not its own"):
        executor.collect()


def test_a_prefix_that_was_never_computed_is_seen() -> None:
    executor = make_executor()
    plan = first_plan([0, 1])
    plan = StepPlan(
        **{name: getattr(plan, name) for name in plan.__struct_fields__ if name not in ("new_sequences", "scheduled")},
        new_sequences=[NewSequence(0, "a", 0, [], [[0, 1]], 4)],
        scheduled=[ScheduledSequence(0, 1, Sampling.DRAW)],
    )
    executor.submit(plan)
    with pytest.raises(AssertionError, match="not its own"):
        executor.collect()


def test_rows_are_compared_with_what_the_scheduler_expects() -> None:
    executor = make_executor()
    executor.submit(first_plan([0, 1]))
    executor.collect()
    assert executor.call(CheckIntegrity([0])) == executor.call(CheckIntegrity(None)) == [CallReply(None)]
    (reply,) = executor.call(CheckIntegrity([0, 1]))
    assert isinstance(reply, CallReply)
    assert reply.fault == "rows [0] are held, not [0, 1]"
    executor.reset()
    assert executor.call(CheckIntegrity([])) == [CallReply(None)]
