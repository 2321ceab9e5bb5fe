"""The engine core under random load, step by step against what each request would yield alone (see `simulation`)."""

import os
from collections import Counter

import pytest
from simulation import Scenario, Windows, parse_scenarios, run, simulate
from world import Kind, World

from quire.scheduler.outcomes import Outcomes
from quire.scheduler.policies.registry import POLICIES

QUICK_STEPS = 2_000
NIGHTLY = os.environ.get("QUIRE_NIGHTLY") == "1"
LONG_SEEDS, LONG_STEPS = (200, 20_000) if NIGHTLY else (20, 2_000)
KINDS = [Kind(flight, *drafts) for flight in (1, 2) for drafts in ((0, 0.0), (3, 0.0), (4, 0.5), (5, 0.9))]
KINDS.append(Kind(2, 6, 0.8, "[(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]"))
WINDOWS: list[Windows] = [(8,), (None, 20), (None, 3, 70)]
ENDS = ("stop", "length", "string", "abort", "error", "refused", "beam")
GUIDED = tuple(f"guided {end}" for end in ("stop", "length", "abort", "error"))
EVENTS = ("reset", "interrupted", "moved", "died", "limits", "pinned", "held", "slept")


@pytest.mark.parametrize("seed", [1, 4])
def test_short_simulation(seed: int) -> None:
    world = simulate(seed, QUICK_STEPS)
    stats = world.scheduler.stats()
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_hits_total > 0
    assert world.num_copies > 0
    assert world.num_forks > 0
    assert world.num_forced > 0
    assert {*ENDS, *GUIDED, "interrupted", "moved", "died"} <= world.ends.keys()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_kind_of_executor(kind: Kind) -> None:
    world = simulate(3, QUICK_STEPS // 5, kind=kind)
    assert (world.num_accepted > 20) == (kind.accuracy > 0)  # a few wrong ones are right where a grammar has its say
    assert bool(world.num_forced) == (kind.tree is None)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy(policy: str) -> None:
    worlds = [simulate(seed, QUICK_STEPS // 4, policy=policy) for seed in (1, 2)]
    assert sum(world.scheduler.stats().num_preemptions_total for world in worlds) > 0


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_windows(windows: Windows, num_in_flight: int) -> None:
    world = simulate(3, QUICK_STEPS // 4, kind=Kind(num_in_flight, 3, 0.5), windows=windows)
    assert world.ends["length"] > 0


def test_same_seed_same_trace() -> None:
    """Invariant 11."""
    assert simulate(4, 500).trace == simulate(4, 500).trace != simulate(5, 500).trace


def test_a_failure_names_the_command_that_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    extend, num_calls = Outcomes._extend, 0

    def once_wrong(self: Outcomes, *args: object) -> object:
        nonlocal num_calls
        num_calls += 1
        assert num_calls != 700, "planted"
        return extend(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Outcomes, "_extend", once_wrong)
    notes: list[str] = []
    scenario = Scenario(7, 4000, Kind(2, 3, 0.5), (None, 20), "priority")
    for _ in range(2):
        num_calls = 0
        with pytest.raises(AssertionError, match="planted") as caught:
            run(scenario)
        (note,) = caught.value.__notes__
        notes.append(note)
        (scenario,) = parse_scenarios(note.partition(".py ")[2].split())
    assert notes[0] == notes[1]


@pytest.mark.slow
def test_long_simulation() -> None:
    worlds = [simulate(seed, LONG_STEPS) for seed in range(LONG_SEEDS)]
    ends = sum((world.ends for world in worlds), Counter[str]())
    assert _num_preemptions(worlds) > LONG_STEPS // 2
    assert min(ends[reason] for reason in (*ENDS, *GUIDED)) > LONG_STEPS // 200
    assert min(ends[event] for event in EVENTS) > LONG_STEPS // 200


@pytest.mark.slow
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_long_simulation_of_windows(windows: Windows) -> None:
    assert _num_preemptions([simulate(seed, LONG_STEPS // 4, windows=windows) for seed in range(5)]) > LONG_STEPS // 200


def _num_preemptions(worlds: list[World]) -> int:
    return sum(world.scheduler.stats().num_preemptions_total for world in worlds)
