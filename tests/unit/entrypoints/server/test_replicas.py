"""Who gets what, and what becomes of it when an engine goes: `ReplicasClient` over engines that compute nothing."""

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import zmq

from quire.config.engine_args import EngineArgs
from quire.config.scheduler import SchedulerConfig
from quire.engine.async_llm import AsyncLLM, AsyncOptions
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.server import replicas
from quire.entrypoints.server.replicas import ReplicasClient
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError, RequestFailedError
from quire.protocol.core import Abort, Add, Call, Command, Dead, Event, Fault, Finish, News, Ready, Refused, Reply
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.stats import EngineStats
from quire.protocol.step import SequenceOutput
from quire.protocol.worker import Returned
from quire.sampling_params import SamplingParams
from quire.scheduler.live_limits import changed

STATS = EngineStats(1, 0, 0.0, 0, 0, 0, {})
NO_ROOM = Fault.of(InvalidRequestError("no room", "prompt"))


class FakeEngine:
    """A `ProcessClient` that notes what it is sent, and says what the test has it say."""

    born: list["FakeEngine"] = []
    refuses_to_start = 0

    def __init__(self, args: EngineArgs, log_level: str, rank: int) -> None:
        self.args, self.rank, self.sent, self.closed = args, rank, [], False
        self.say: Callable[[Event], None] = lambda event: None
        self.stuck = 0.0
        FakeEngine.born.append(self)

    def wait_ready(self) -> Ready:
        if FakeEngine.refuses_to_start and len(FakeEngine.born) > 2:
            FakeEngine.refuses_to_start -= 1
            raise ModelLoadError("not now")
        return Ready(100 + self.rank, 8, 2)

    def attach(self, on_event: Callable[[Event], None]) -> None:
        self.say = on_event

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def seconds_stuck(self) -> float:
        return self.stuck

    def kill(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def ids(self) -> list[str]:
        return [command.request.request_id for command in self.sent if isinstance(command, Add)]

    def news(self, request_id: str, end: str | None = None, index: int = 0) -> None:
        self.say(News([SequenceOutput(request_id, index, [5], finish_reason=end)], [], 0.0, 0.0, STATS))


class World:
    """A client of two fake engines, on a running event loop."""

    def __init__(self) -> None:
        args = EngineArgs(model="demo", data_parallel_size=2)
        self.client = ReplicasClient(args, args.resolve(), AsyncOptions())
        self.ready = self.client.wait_ready()
        self.events: list[Event] = []
        self.client.attach(self.events.append)

    @property
    def engines(self) -> list[FakeEngine]:
        return [replica.client for replica in self.client._replicas]  # type: ignore[misc]

    def add(self, request_id: str, tokens: list[int] | None = None, n: int = 1, salt: str | None = None) -> int:
        """Send a request; the rank that got it."""
        task = SamplingTask(params=SamplingParams(n=n), max_tokens=4, stop_token_ids=frozenset(), seed=0)
        request = NewRequest(request_id=request_id, prompt_token_ids=tokens or [1], task=task, cache_salt=salt)
        self.client.send(Add(request))
        return next(engine.rank for engine in self.engines if request_id in engine.ids())

    async def until_up(self) -> None:
        deadline = time.monotonic() + 10
        while any(state.state != "up" for state in self.client.states()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)


def play(scene: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        world = World()
        try:
            await scene(world)
        finally:
            world.client.close()
        assert all(engine.closed for engine in world.engines)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEngine.born, FakeEngine.refuses_to_start = [], 0
    monkeypatch.setattr(replicas, "ProcessClient", FakeEngine)


def test_the_shortest_context_and_all_blocks_count() -> None:
    async def scene(world: World) -> None:
        assert world.ready == Ready(100, 16, 2)

    play(scene)


def test_prompts_go_where_their_beginning_is_unless_salted_otherwise() -> None:
    async def scene(world: World) -> None:
        first = world.add("a", [1, 2, 3, 4])
        assert world.add("other", [9, 9, 9, 9]) != first
        assert world.add("b", [1, 2, 3, 4, 5]) == first
        assert world.add("c", [1, 2, 3, 4, 5], salt="x") != first

    play(scene)


def test_aborts_and_stops_go_to_whoever_has_the_request() -> None:
    async def scene(world: World) -> None:
        ranks = {name: world.add(name, n=2) for name in "ab"}
        assert ranks == {"a": 0, "b": 1}
        world.client.send(Abort(["a", "b", "unknown"]))
        world.client.send(Finish([("b", 1), ("unknown", 0)]))
        assert world.engines[0].sent[1:] == [Abort(["a"])]
        assert world.engines[1].sent[1:] == [Abort(["b"]), Finish([("b", 1)])]
        for name in "ab":
            world.engines[ranks[name]].news(name, "abort", 0)
        assert [state.num_requests for state in world.client.states()] == [1, 0], "b's second was stopped, a's goes on"
        world.engines[1].news("b", "length", 1)  # it had ended by itself meanwhile
        assert [state.num_requests for state in world.client.states()] == [1, 0]

    play(scene)


def test_what_a_dead_engine_had_not_begun_moves_and_the_rest_ends() -> None:
    async def scene(world: World) -> None:
        begun, waiting = world.engines[world.add("begun")], world.add("other")
        world.add("late")
        assert begun.ids() == ["begun", "late"]
        begun.news("begun")
        world.client.send(Abort(["late"]))
        begun.say(Dead("it broke"))
        assert world.client.stats[0].num_requests_running == 0, "it runs nothing any more"
        (lost,) = [event for event in world.events if isinstance(event, Refused)]
        assert (lost.request_id, lost.fault.kind) == ("begun", "EngineDeadError")
        assert lost.fault.message == (
            "engine 0 is dead: it broke. This request is not complete; another try goes to another engine."
        )
        assert world.engines[waiting].ids() == ["other", "late"]
        assert world.engines[waiting].sent[-1] == Abort(["late"]), "it was aborted, wherever it is"
        num_events = len(world.events)
        begun.news("late")
        assert len(world.events) == num_events, "last words count for nothing"
        await world.until_up()
        assert begun.closed
        assert world.engines[0] is not begun
        assert world.client.states()[0].num_restarts == 1
        assert world.engines[0].args.max_model_len == 100, "it has to hold what was promised"
        assert world.add("next") == 0

    play(scene)


def test_a_request_is_moved_once_and_the_last_engines_death_is_the_end() -> None:
    async def scene(world: World) -> None:
        FakeEngine.refuses_to_start = 100
        rank = world.add("poison")
        world.engines[rank].say(Dead("it broke"))
        world.engines[1 - rank].say(Dead("it broke too"))
        assert isinstance(world.events[-1], Dead)
        assert "No other engine is up" in world.events[-1].message

    play(scene)


@pytest.mark.slow
def test_a_request_that_kills_two_engines_ends() -> None:
    async def scene(world: World) -> None:
        rank = world.add("poison")
        world.engines[rank].say(Dead("it broke"))
        await world.until_up()
        world.engines[1 - rank].say(Dead("it broke too"))
        assert isinstance(world.events[-1], Refused)
        assert world.events[-1].fault.kind == "EngineDeadError"
        await world.until_up()
        assert [state.num_requests for state in world.client.states()] == [0, 0]

    play(scene)


def test_an_engine_that_does_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_LONGEST_WAIT", 0.01)

    async def scene(world: World) -> None:
        FakeEngine.refuses_to_start = 2
        world.engines[1].say(Dead("it broke"))
        await world.until_up()
        assert len(FakeEngine.born) == 5
        assert all(engine.closed for engine in FakeEngine.born[1:4])

    play(scene)


def test_an_abort_of_what_waits_for_an_engine_is_heard_at_once() -> None:
    async def scene(world: World) -> None:
        FakeEngine.refuses_to_start = 100
        world.engines[world.add("a")].say(Dead("it broke"))
        assert [state.state for state in world.client.states()] == ["starting", "up"]
        world.client._drain(world.client._replicas[1])
        task = SamplingTask(params=SamplingParams(n=2), max_tokens=4, stop_token_ids=frozenset(), seed=0)
        world.client.send(Add(NewRequest(request_id="waits", prompt_token_ids=[1], task=task)))
        world.events.clear()
        world.client.send(Abort(["waits"]))
        (news,) = world.events
        assert isinstance(news, News)
        assert [(item.sequence_index, item.finish_reason) for item in news.outputs] == [(0, "abort"), (1, "abort")]
        world.client.send(Abort(["waits"]))
        assert world.events == [news]
        assert "waits" not in world.client._routes

    play(scene)


def test_restart_waits_for_requests_and_keeps_one_engine() -> None:
    async def scene(world: World) -> None:
        old = world.engines[0]
        assert world.add("a") == 0
        world.client.restart(0)
        assert world.client.states()[0].state == "draining"
        assert [world.add(str(i)) for i in range(3)] == [1, 1, 1]
        for rank in (0, 1, 2, -1):
            with pytest.raises(InvalidRequestError, match=rf"engine {rank} can't restart.*\[1\] are"):
                world.client.restart(rank)
        old.news("a")
        assert not old.closed
        old.news("a", "stop")
        await world.until_up()
        assert old.closed
        assert world.engines[0] is not old

    play(scene)


def test_calls_go_to_all_and_are_answered_once() -> None:
    async def scene(world: World) -> None:
        world.client.send(Call(7, "unpin_prefix", ["p"]))
        for engine, value in zip(world.engines, (True, False), strict=True):
            assert engine.sent == [Call(7, "unpin_prefix", ["p"])]
            engine.say(Reply(7, value))
        assert world.events == [Reply(7, False)]

    play(scene)


def test_a_call_does_without_an_engine_that_dies() -> None:
    async def scene(world: World) -> None:
        world.client.send(Call(7, "check_integrity"))
        world.engines[0].say(Reply(7))
        world.engines[1].say(Dead("it broke"))
        assert [event for event in world.events if isinstance(event, Reply)] == [Reply(7)]

    play(scene)


def test_all_engines_have_the_same_weights_where_one_could_not_change_them() -> None:
    async def scene(world: World) -> None:
        changed, other = world.engines
        world.client.send(Call(1, "update_weights", ["/a"]))
        for engine in world.engines:
            engine.say(Reply(1, True))
        world.client.send(Call(2, "update_weights", ["/b"]))
        changed.say(Reply(2, True))
        other.say(Reply(2, fault=Fault.of(RequestFailedError("no memory"))))
        assert world.events[-1].fault.message == "no memory"  # type: ignore[union-attr]
        await world.until_up()
        assert changed.closed
        assert world.engines[1] is other
        told = [command.arguments for command in world.engines[0].sent if isinstance(command, Call)]
        assert told == [["/a"]], "as the other has them"

    play(scene)


def test_what_is_held_is_in_nobodys_way_and_holds_where_an_engine_starts_again() -> None:
    async def scene(world: World) -> None:
        rank = world.add("a", [1, 2, 3, 4])
        world.client.send(Call(1, "hold", [True]))
        for engine in world.engines:
            engine.say(Reply(1))
        world.client.send(Call(2, "sleep", [1]))
        for engine in world.engines:
            assert engine.sent[-1] == Call(2, "sleep", [1])
            engine.say(Reply(2, True))
        assert world.events[-1] == Reply(2, True)
        world.engines[1 - rank].say(Dead("it broke"))
        await world.until_up()
        told = [(each.name, each.arguments) for each in world.engines[1 - rank].sent if isinstance(each, Call)]
        assert told == [("sleep", [1]), ("hold", [True])]
        world.client.send(Call(3, "hold", [False]))
        for engine in world.engines:
            engine.say(Reply(3))
        world.client.send(Call(4, "sleep", [1, False]))
        assert world.events[-1] == Reply(4, False)
        world.client.send(Call(5, "sleep", [1, True]))
        assert [engine.sent[-1] for engine in world.engines] == [Call(5, "sleep", [1, True])] * 2

    play(scene)


def test_the_cache_is_reset_everywhere_or_nowhere() -> None:
    async def scene(world: World) -> None:
        rank = world.add("a", [1, 2, 3, 4])
        world.client.send(Call(1, "reset_prefix_cache"))
        assert world.events == [Reply(1, False)]
        world.engines[rank].news("a", "stop")
        world.client.send(Call(2, "reset_prefix_cache"))
        for engine in world.engines:
            engine.say(Reply(2, True))
        assert world.events[-1] == Reply(2, True)
        assert world.add("b", [1, 2, 3, 4]) != rank, "nobody holds it: the next one's turn"

    play(scene)


def test_limits_and_pins_are_told_to_an_engine_that_comes_back() -> None:
    async def scene(world: World) -> None:
        world.client.send(Call(1, "set_limits", [{"max_num_seqs": 3}]))
        world.client.send(Call(2, "pin_prefix", ["p", [1, 2], "salt"]))
        for engine in world.engines:
            engine.say(Reply(1))
            (prompt,) = engine.ids()
            assert engine.sent[-1].request.cache_salt == "salt"
            engine.news(prompt, "length")
            assert engine.sent[-1] == Call(2, "pin_prefix", ["p", [1, 2], "salt"])
            engine.say(Reply(2))
        assert [event for event in world.events if isinstance(event, Reply)] == [Reply(1), Reply(2)]
        world.client.restart(1)
        await world.until_up()
        new = world.engines[1]
        assert new.sent[0] == Call(-1, "set_limits", [{"max_num_seqs": 3}])
        new.news(new.ids()[0], "length")
        assert new.sent[-1] == Call(-1, "pin_prefix", ["p", [1, 2], "salt"])
        new.say(Reply(-1))
        assert [event for event in world.events if isinstance(event, Reply)] == [Reply(1), Reply(2)]

    play(scene)


def test_a_prefix_is_pinned_everywhere_or_nowhere() -> None:
    async def scene(world: World) -> None:
        world.client.send(Call(2, "pin_prefix", ["p", [1, 2], None]))
        first, second = world.engines
        first.news(first.ids()[0], "length")
        first.say(Reply(2))
        second.say(Refused(second.ids()[0], NO_ROOM))
        assert Reply(2, fault=NO_ROOM) in world.events
        for engine in world.engines:
            assert engine.sent[-1] == Call(-1, "unpin_prefix", ["p"])

    play(scene)


def test_what_is_unpinned_while_a_returned_engine_computes_it_is_pinned_nowhere() -> None:
    async def scene(world: World) -> None:
        for number, name in enumerate("pq"):
            world.client.send(Call(number, "pin_prefix", [name, [1, 2], None]))
            for engine in world.engines:
                engine.news(engine.ids()[-1], "length")
                engine.say(Reply(number))
        world.client.restart(1)
        await world.until_up()
        world.client.send(Call(7, "unpin_prefix", ["p"]))
        new = world.engines[1]
        for request_id in new.ids():
            new.news(request_id, "length")
        assert [call.arguments[0] for call in new.sent if isinstance(call, Call) and call.name == "pin_prefix"] == ["q"]

    play(scene)


def test_a_name_that_is_none_is_refused_by_all() -> None:
    async def scene(world: World) -> None:
        world.client.send(Call(2, "pin_prefix", [["p"], [1, 2], None]))
        for engine in world.engines:
            engine.news(engine.ids()[0], "length")
            engine.say(Reply(2, fault=NO_ROOM))
        assert Reply(2, fault=NO_ROOM) in world.events

    play(scene)


def test_engines_sleep_where_one_does() -> None:
    """As after a wake-up that failed on one, which may be tried again."""

    async def scene(world: World) -> None:
        world.client.send(Call(1, "is_sleeping"))
        for engine, value in zip(world.engines, (True, False), strict=True):
            engine.say(Reply(1, value))
        assert world.events == [Reply(1, True)]

    play(scene)


@pytest.mark.slow
def test_a_silent_engine_is_replaced() -> None:
    async def scene(world: World) -> None:
        old = world.engines[1]
        old.stuck = float("inf")
        deadline = time.monotonic() + 10
        while not world.client.states()[1].num_restarts:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await world.until_up()
        assert old.closed

    play(scene)


def test_news_tell_the_sums_of_all() -> None:
    async def scene(world: World) -> None:
        for name in "ab":
            world.engines[world.add(name)].news(name)
        await asyncio.sleep(0.11)
        world.engines[0].say(News([], [], 0.0, time.monotonic(), STATS))
        assert isinstance(world.events[-1], News)
        assert world.events[-1].stats.num_requests_running == 2
        assert [stats.num_requests_running for stats in world.client.stats] == [1, 1]

    play(scene)


def test_threads_are_refused() -> None:
    args = EngineArgs(model="demo", data_parallel_size=2)
    with pytest.raises(ConfigError, match="data_parallel_size=2 needs engine='process'"):
        ReplicasClient(args, args.resolve(), AsyncOptions(engine="thread"))


def test_where_one_engine_is_all_there_is_more_are_refused() -> None:
    args = EngineArgs(model="demo", data_parallel_size=2)
    with pytest.raises(ConfigError, match="ReplicasClient"):
        AsyncLLM.from_engine_args(args)
    with pytest.raises(ConfigError, match="ReplicatedCore"):
        LLMEngine.from_engine_args(args)
    for size in (0, -1):
        with pytest.raises(ConfigError, match="data_parallel_size"):
            EngineArgs(model="demo", data_parallel_size=size)


def test_answers_come_in_the_order_of_engines() -> None:
    async def scene(world: World) -> None:
        world.client.send(Call(1, "call_workers", ["method", []]))
        for rank in (1, 0):
            world.engines[rank].say(Reply(1, Returned([rank])))
        assert world.events == [Reply(1, Returned([0, 1]))]

    play(scene)


def test_what_is_aborted_is_in_no_calls_way() -> None:
    """An engine has ended it by the time that it hears of the call."""

    async def scene(world: World) -> None:
        rank = world.add("a")
        world.client.send(Abort(["a"]))
        world.client.send(Call(1, "update_weights", ["/a"]))
        assert [engine.sent[-1] for engine in world.engines] == [Call(1, "update_weights", ["/a"])] * 2
        world.engines[rank].news("a", "abort")
        for engine in world.engines:
            engine.say(Reply(1, True))
        assert world.events[-1] == Reply(1, True)

    play(scene)


def test_engines_sleep_all_or_none_though_one_pins_a_prefix() -> None:
    async def scene(world: World) -> None:
        world.client.send(Call(1, "pin_prefix", ["p", [1, 2], None]))
        for engine in world.engines:
            engine.news(engine.ids()[0], "length")
            engine.say(Reply(1))
        world.client.restart(1)
        await world.until_up()
        world.client.send(Call(2, "sleep", [1]))  # while the new one computes the prefix
        assert world.events[-1] == Reply(2, False)
        world.engines[1].say(Dead("it broke"))
        world.client.send(Call(3, "sleep", [1]))
        assert world.engines[0].sent[-1] == Call(3, "sleep", [1]), "nobody computes it any more"

    play(scene)


def test_an_engine_that_comes_back_answers_what_others_are_asked() -> None:
    """Or else it had other weights than they, for good."""

    async def scene(world: World) -> None:
        slow, dies = world.engines
        world.client.send(Call(1, "update_weights", ["/a"]))
        dies.say(Dead("it broke"))
        await world.until_up()
        assert world.engines[1].sent == [Call(1, "update_weights", ["/a"])]
        slow.say(Reply(1, True))
        assert not [event for event in world.events if isinstance(event, Reply)]
        world.engines[1].say(Reply(1, True))
        assert world.events[-1] == Reply(1, True)

    play(scene)


def test_an_engine_that_can_not_be_as_the_others_does_not_serve() -> None:
    """The files of weights that they were given may be gone."""

    async def scene(world: World) -> None:
        world.client.send(Call(1, "update_weights", ["/a"]))
        for engine in world.engines:
            engine.say(Reply(1, True))
        world.client.restart(1)
        await world.until_up()
        different = world.engines[1]
        [told] = different.sent
        world.add("a")
        assert world.add("b") == 1
        different.say(Reply(told.call_id, fault=Fault.of(RequestFailedError("it is gone"))))  # type: ignore[union-attr]
        different.news("b", "stop")
        assert not [event for event in world.events if isinstance(event, News) and event.outputs], "of other weights"
        assert world.engines[0].ids() == ["a", "b"]
        await world.until_up()
        assert different.closed
        assert world.client.states()[1].num_restarts == 2

    play(scene)


def test_calls_do_without_an_engine_that_says_it_is_dead() -> None:
    """Where its ranks are no more alike, it answers, and dies then; nobody else's weights are undone for that."""

    async def scene(world: World) -> None:
        good, broken = world.engines
        world.client.send(Call(1, "update_weights", ["/a"]))
        good.say(Reply(1, True))
        broken.say(Reply(1, fault=Fault.of(EngineDeadError("the workers are no more alike"))))
        broken.say(Dead("the workers are no more alike"))
        assert [event for event in world.events if isinstance(event, Reply)] == [Reply(1, True)]
        assert not any(isinstance(event, Dead) for event in world.events)
        await world.until_up()
        assert not good.closed
        assert [(each.name, each.arguments) for each in world.engines[1].sent] == [("update_weights", ["/a"])]  # type: ignore[union-attr]

    play(scene)


def test_limits_of_a_policy_go_with_it() -> None:
    async def scene(world: World) -> None:
        fair, plain = {"policy": "fair", "fair_input_weight": 2.0}, {"max_num_seqs": 3, "policy": "fcfs"}
        for number, changes in enumerate((fair, plain)):
            world.client.send(Call(number, "set_limits", [changes]))
            for engine in world.engines:
                engine.say(Reply(number))
        world.client.restart(1)
        await world.until_up()
        [told] = world.engines[1].sent
        config = SchedulerConfig(max_model_len=64)
        assert changed(config, config, told.arguments[0]) == replace(config, max_num_seqs=3)  # type: ignore[union-attr]

    play(scene)


def test_an_engine_is_started_again_whatever_its_start_failed_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_LONGEST_WAIT", 0.01)

    class Fails(FakeEngine):
        num_fails = 1

        def __init__(self, *given: Any) -> None:
            if len(FakeEngine.born) > 1 and Fails.num_fails:
                Fails.num_fails -= 1
                raise zmq.ZMQError(errno.EMFILE)
            super().__init__(*given)

    monkeypatch.setattr(replicas, "ProcessClient", Fails)

    async def scene(world: World) -> None:
        world.engines[1].say(Dead("it broke"))
        await world.until_up()
        assert not Fails.num_fails

    play(scene)


def test_nobody_watches_engines_that_were_shut_down() -> None:
    async def scene(world: World) -> None:
        world.client.close()
        await asyncio.sleep(0.01)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    play(scene)


@pytest.mark.parametrize("is_loading", [False, True])
def test_an_engine_that_comes_back_while_no_loop_runs_serves_in_the_next(
    is_loading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `asyncio.run` has a loop of its own."""
    loaded = threading.Event()

    class Slow(FakeEngine):
        def wait_ready(self) -> Ready:
            assert len(FakeEngine.born) < 3 or loaded.wait(10)
            return super().wait_ready()

    monkeypatch.setattr(replicas, "ProcessClient", Slow)

    async def first() -> World:
        world = World()
        world.engines[1].say(Dead("it broke"))
        return world

    async def second(world: World) -> None:
        world.client.attach(world.events.append)
        assert [state.state for state in world.client.states()] == ["up", "starting" if is_loading else "up"]
        loaded.set()
        await world.until_up()
        assert {world.add("a"), world.add("b")} == {0, 1}
        world.client.close()

    world = asyncio.run(first())
    starter = world.client._replicas[1].starter
    assert starter is not None
    if not is_loading:
        loaded.set()
        starter.join()
    asyncio.run(second(world))
