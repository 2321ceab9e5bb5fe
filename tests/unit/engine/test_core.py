"""The engine core on a simulated executor: Ctrl-C at every point of a step, a dead executor, idle steps."""

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from simulated import FakeModel, SimulatedExecutor

from quire.config.scheduler import SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.interrupts import InterruptShield
from quire.engine.loop import CoreLoop
from quire.errors import EngineDeadError
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.core import Call, Dead, Event, Reply
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.worker import CallReply
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler

Found = dict[tuple[str, int], list[int]]


def make_core(max_in_flight: int = 1, executor: SimulatedExecutor | None = None) -> EngineCore:
    """A small engine in which blocks run out, with drafts that are mostly right."""
    config = SchedulerConfig(max_model_len=64, max_num_batched_tokens=12, max_num_seqs=4)
    layout = CacheLayout(block_size=4, groups=[CacheGroup(layers=[0])], num_blocks=[12], max_model_len=64)
    executor = executor or SimulatedExecutor(FakeModel(max_drafts=2, accuracy=0.7), max_in_flight)
    executor.initialize_cache(layout)
    executor.clock = lambda: 0.0
    core = EngineCore(Scheduler(config, KVManager(layout)), executor)
    for i in range(3):
        task = SamplingTask(
            params=SamplingParams(n=1 + i % 2, max_tokens=8), max_tokens=8, stop_token_ids=frozenset(), seed=i
        )
        core.add(NewRequest(request_id=str(i), prompt_token_ids=[1, 2, 3, 4, 5, i] * (1 + i), task=task))
    return core


def take(core: EngineCore, found: Found) -> None:
    for output in core.step():
        found.setdefault((output.request_id, output.sequence_index), []).extend(output.new_token_ids)


def finish(core: EngineCore, found: Found) -> Found:
    while core.has_unfinished():
        take(core, found)
        core.check_integrity()
    return found


class Interrupter:
    """Sends SIGINT at the n-th call of a function of quire, and counts the calls."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "/quire/" in frame.f_code.co_filename:
            self.count += 1
            if self.count == self.place:
                signal.raise_signal(signal.SIGINT)


def interrupted(core: EngineCore, found: Found, place: int) -> int:
    """Step until done or interrupted; returns the number of calls."""
    interrupter = Interrupter(place)
    sys.setprofile(interrupter)
    try:
        while core.has_unfinished():
            take(core, found)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return interrupter.count


@pytest.fixture(autouse=True)
def python_handles_interrupts(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_interrupt_at_any_call_loses_nothing(max_in_flight: int) -> None:
    expected = finish(make_core(max_in_flight), {})
    num_calls = interrupted(make_core(max_in_flight), {}, place=-1)
    assert num_calls > 500
    for place in range(1, num_calls, 7):
        core, found = make_core(max_in_flight), {}
        interrupted(core, found, place)
        core.check_integrity()
        assert finish(core, found) == expected, f"interrupted at call {place}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Interrupted(SimulatedExecutor):
    """Is interrupted once, while it works: its rows are half written then."""

    def __init__(self, at: str) -> None:
        super().__init__(FakeModel(), max_in_flight=2)
        self.at = at

    def submit(self, plan: Any) -> None:
        self._perhaps("submit")
        super().submit(plan)

    def collect(self, guide: Any = None) -> Any:
        result = super().collect(guide)
        self._perhaps("collect")
        return result

    def _perhaps(self, at: str) -> None:
        if at == self.at and self.rows:
            self.at = ""
            self.rows.popitem()
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", ["submit", "collect"])
def test_an_interrupt_while_the_executor_works(at: str) -> None:
    core, found = make_core(executor=_Interrupted(at)), {}
    assert call(lambda: finish(core, found))
    core.check_integrity()
    expected = finish(make_core(executor=SimulatedExecutor(FakeModel())), {})
    assert finish(core, found) == expected


@pytest.mark.parametrize("at", ["submit", "collect"])
def test_a_failed_executor_is_dead(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    core = make_core()

    def fail(*args: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(core.executor, at, fail)
    with pytest.raises(EngineDeadError, match="the executor failed"):
        core.step()
    with pytest.raises(EngineDeadError, match="MemoryError: no more"):
        core.step()


def test_workers_that_are_no_more_alike_are_dead_though_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is to know before the next request comes."""
    core = make_core()
    finish(core, {})
    replies = [CallReply(None), CallReply("no memory")]
    monkeypatch.setattr(core.executor, "call", lambda call: replies)
    commands, events = iter([[Call(7, "call_workers", ["load", []])]]), list[Event]()
    assert not CoreLoop(core, lambda wait: next(commands), events.append).run()
    reply, dead = events
    assert isinstance(reply, Reply)
    assert reply.fault is not None
    assert "no more alike: no memory" in reply.fault.message
    assert isinstance(dead, Dead)
    assert "no memory" in dead.message


def test_an_idle_step_does_nothing() -> None:
    core = make_core()
    finish(core, {})
    assert core.step() == []
    assert core.step() == []


def call(function: Callable[[], object]) -> bool:
    try:
        function()
    except KeyboardInterrupt:
        return True
    return False


def test_the_shield_holds_an_interrupt_back_until_its_outermost_end() -> None:
    shield, reached = InterruptShield(), []

    def shielded() -> None:
        with shield:
            with shield:
                signal.raise_signal(signal.SIGINT)
                assert shield.pending
            assert shield.pending
            reached.append("end")

    assert call(shielded)
    assert reached == ["end"]
    assert not shield.pending


def test_the_shield_lets_through_what_is_to_be_interrupted() -> None:
    shield, reached = InterruptShield(), []

    def shielded() -> None:
        with shield:
            assert call(lambda: shield.let_through(signal.raise_signal, signal.SIGINT))
            signal.raise_signal(signal.SIGINT)  # again: the shield is up
            reached.append("after")
            assert call(lambda: shield.let_through(reached.append, "never")), "held back until here"

    assert not call(shielded)
    assert reached == ["after"]
