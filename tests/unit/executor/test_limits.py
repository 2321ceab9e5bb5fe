"""The limits after which something is taken for dead: their sums, on a machine that has nothing else to do."""

from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.engine.clients import process as engine
from quire.executor import orders, processes, ray, remote
from quire.executor.ray import Actors

TOLD_SECONDS = 10.0  # docs/distributed.md


def test_whoever_stops_is_told_within_ten_seconds() -> None:
    """A beat may have come just before, and each that looks may just have looked."""
    looks = 2 * orders.BEAT_SECONDS + remote._LOOK_SECONDS
    rank = processes.SILENCE_SECONDS + looks
    assert rank < TOLD_SECONDS
    assert ray.SILENCE_SECONDS + ray._ASK_SECONDS + looks < TOLD_SECONDS
    assert engine.SILENCE_SECONDS + 2 * engine.BEAT_SECONDS < TOLD_SECONDS


def test_who_hears_of_an_end_waits_until_its_cause_is_found() -> None:
    """A rank that waits for another one is told at once where that has ended; that it stopped, the watch finds."""
    assert processes.SILENCE_SECONDS + 2 * orders.BEAT_SECONDS <= remote._CAUSE_SECONDS < TOLD_SECONDS


@pytest.mark.parametrize(("state", "ready", "told"), [("S", False, False), ("T", False, True), ("S", True, True)])
def test_a_rank_that_loads_may_be_silent_unless_it_was_stopped(state: str, ready: bool, told: bool) -> None:
    """On a node that others keep busy, libraries take longer than any limit to load."""

    class Task:
        def options(self, scheduling_strategy: tuple[str, bool]) -> "Task":
            assert scheduling_strategy == ("node-1", False)
            return self

        def remote(self, process: int) -> str:
            assert process == 77
            return state

    workers: Any = Actors(EngineArgs(distributed_executor_backend="ray"))
    workers._ray = SimpleNamespace(
        is_initialized=lambda: True,
        wait=lambda beats, timeout: ([], beats),
        remote=lambda num_cpus: lambda function: Task(),
        get=lambda answer, timeout: answer,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    workers._strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
    workers._places = [("0.1", "192.0.2.1 node-1", 77, "")]
    workers._beats, workers._silent = [None], [0]
    looks = [workers.look(ready) for _ in range(int(ray.SILENCE_SECONDS / orders.BEAT_SECONDS))]
    assert looks[:-1] == [None] * len(looks[:-1])
    assert looks[-1] == ((0, "has given no sign of life for 5 s") if told else None)
