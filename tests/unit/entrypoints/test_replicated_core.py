"""Several engines as one core that is stepped: what it is told, what steps say, its end; over a played client."""

import asyncio
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.engine_args import EngineArgs
from quire.entrypoints import replicated_core
from quire.entrypoints.replicated_core import ReplicatedCore
from quire.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotYetSupportedError,
    OverloadedError,
    RequestFailedError,
)
from quire.protocol.core import Abort, Add, Call, Command, Dead, Event, Fault, Finish, News, Ready, Refused, Reply
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.stats import EngineSnapshot, EngineStats
from quire.protocol.step import SequenceOutput

STATS = EngineStats(1, 0, 0.0, 0, 0, 0, {})
ARGS = EngineArgs(model="demo", data_parallel_size=2)


class PlayedClient:
    """A `ReplicasClient` that answers each command as the test says."""

    born: list["PlayedClient"] = []

    def __init__(self, *given: Any) -> None:
        self.sent: list[Command] = []
        self.say: Callable[[Event], None] = lambda event: None
        self.answer: Callable[[Command], Event | None] = lambda command: None
        self.closed = threading.Event()
        PlayedClient.born.append(self)

    def wait_ready(self) -> Ready:
        return Ready(100, 16, 2)

    def attach(self, on_event: Callable[[Event], None]) -> None:
        assert asyncio.get_running_loop()
        self.say = on_event

    def send(self, command: Command) -> None:
        self.sent.append(command)
        if (event := self.answer(command)) is not None:
            self.say(event)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedClient]:
    PlayedClient.born = []
    monkeypatch.setattr(replicated_core, "ReplicasClient", PlayedClient)
    core = ReplicatedCore(ARGS, ARGS.resolve())
    PlayedClient.born[0].core = core  # type: ignore[attr-defined]
    yield PlayedClient.born[0]
    core.stop()
    assert all(one.closed.is_set() for one in PlayedClient.born)


def request(name: str, n: int = 1) -> NewRequest:
    task = SamplingTask(params=SamplingParams(n=n), max_tokens=4, stop_token_ids=frozenset(), seed=0)
    return NewRequest(request_id=name, prompt_token_ids=[1], task=task)


def news(*items: tuple[str, int, str | None]) -> News:
    outputs = [SequenceOutput(name, index, [5], finish_reason=end) for name, index, end in items]
    return News(outputs, [name for name, _, _ in items], 0.0, 0.0, STATS)


def test_news_are_steps_until_all_sequences_have_ended(client: Any) -> None:
    core: ReplicatedCore = client.core
    assert core.max_model_len == 100
    assert not core.has_unfinished()
    client.answer = lambda command: news(("a", 0, None), ("a", 1, "length"))
    core.add(request("a", n=2))
    assert [item.sequence_index for item in core.step()] == [0, 1]
    assert core.first_scheduled == ["a", "a"]
    assert core.has_unfinished()
    client.answer = lambda command: None
    core.finish_sequence("a", 0)
    core.finish_sequence("a", 0)
    assert not core.has_unfinished()
    assert core.abort("b") == []
    core.stop()
    assert [type(command) for command in client.sent] == [Add, Finish, Finish, Abort]


def test_calls_wait_for_their_answer_and_lose_no_news(client: Any) -> None:
    core: ReplicatedCore = client.core

    def answer(command: Command) -> Event | None:
        if not isinstance(command, Call):
            return None
        client.say(news(("a", 0, "length")))
        if command.name == "pin_prefix":
            return Reply(command.call_id, fault=Fault.of(InvalidRequestError("too short", "prompt")))
        return Reply(command.call_id, EngineSnapshot(STATS, [], 0, b"", 2) if command.name == "snapshot" else True)

    client.answer = answer
    core.add(request("a"))
    assert core.call("reset_prefix_cache") is True
    assert core.stats() is STATS
    with pytest.raises(InvalidRequestError, match="too short"):
        core.call("pin_prefix", "p", [1], None)
    assert [item.finish_reason for item in core.step()] == ["length"] * 3
    assert core.first_scheduled == ["a"] * 3


def test_what_no_engine_took_or_what_was_lost_ends_with_the_reason(client: Any) -> None:
    core: ReplicatedCore = client.core
    said = {
        "wrong": Refused("wrong", Fault.of(InvalidRequestError("it can never fit", "max_tokens"))),
        "lost": Refused("lost", Fault.of(EngineDeadError("engine 1 is dead"))),
        "late": Refused("late", Fault.of(OverloadedError("its target can't be met", 3))),
    }
    client.answer = lambda command: (
        Reply(command.call_id, True) if isinstance(command, Call) else said[command.request.request_id]
    )
    core.add(request("wrong", n=2))
    ended = core.step()
    assert [(item.finish_reason, item.failure and item.failure.param) for item in ended] == [
        ("error", "max_tokens")
    ] * 2
    core.add(request("lost"))
    assert [item.failure and item.failure.message for item in core.step()] == ["engine 1 is dead"]
    core.add(request("late"))
    assert [(item.finish_reason, item.failure and item.failure.message) for item in core.step()] == [
        ("error", "its target can't be met")
    ]
    assert not core.has_unfinished()
    core.add(request("late"))
    assert core.call("reset_prefix_cache"), "who asks for something else hears nothing of it"
    assert [item.finish_reason for item in core.step()] == ["error"]


def test_when_all_are_dead_everybody_is_told(client: Any) -> None:
    core: ReplicatedCore = client.core
    client.answer = lambda command: Dead("engine 0 is dead")
    core.add(request("a"))
    for call in (core.step, core.step, core.stats, lambda: core.add(request("b"))):
        with pytest.raises(EngineDeadError, match="engine 0 is dead"):
            call()


def test_an_interrupt_ends_the_wait_and_the_core_goes_on(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core: ReplicatedCore = client.core
    core.add(request("a"))
    with monkeypatch.context() as patch:
        patch.setattr(core._come, "wait", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            core.step()
    client.answer = lambda command: news(("a", 0, "abort")) if isinstance(command, Abort) else None
    core.abort("a")
    assert [item.finish_reason for item in core.step()] == ["abort"]


def test_one_that_nobody_holds_ends_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    PlayedClient.born = []
    monkeypatch.setattr(replicated_core, "ReplicasClient", PlayedClient)
    core = ReplicatedCore(ARGS, ARGS.resolve())
    kept = weakref.ref(core)
    del core
    gc.collect()
    assert kept() is None
    assert PlayedClient.born[0].closed.is_set()


def test_llm_says_which_prompt_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(PlayedClient):
        def send(self, command: Command) -> None:
            if isinstance(command, Add) and command.request.request_id == "1":
                self.say(Refused("1", Fault.of(InvalidRequestError("it can never fit", "max_tokens"))))

    monkeypatch.setattr(replicated_core, "ReplicasClient", Refuses)
    llm = LLM("demo", data_parallel_size=2)
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\] \(of 3\): it can never fit"):
        llm.generate(["a", "b", "c"], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="logits_processors are Python functions"):
        llm.generate("a", SamplingParams(logits_processors=[lambda ids, logits: logits]), use_tqdm=False)
    with pytest.raises(NotYetSupportedError, match="apply_model needs a model in this process"):
        llm.apply_model(print)
    llm.llm_engine.shutdown()
    with pytest.raises(EngineDeadError, match="the engines were stopped"):
        llm.generate("a", use_tqdm=False)


def test_engines_that_torchrun_started_are_no_replicas() -> None:
    with pytest.raises(NotYetSupportedError, match="external_launcher"):
        LLM("demo", data_parallel_size=2, distributed_executor_backend="external_launcher")


def test_what_failed_on_one_engine_may_have_put_another_to_sleep(client: Any) -> None:
    core: ReplicatedCore = client.core
    fault = Fault.of(RequestFailedError("no memory"))

    def answer(command: Command) -> Event | None:
        if not isinstance(command, Call):
            return None
        return Reply(command.call_id, True) if command.name == "is_sleeping" else Reply(command.call_id, fault=fault)

    client.answer = answer
    with pytest.raises(RequestFailedError, match="no memory"):
        core.call("sleep", 1)
    with pytest.raises(OverloadedError, match="the engines sleep"):
        core.add(request("a"))
