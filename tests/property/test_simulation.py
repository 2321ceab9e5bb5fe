"""The engine core under random load, step by step against what each request would yield alone (see `simulation`)."""

from collections import Counter

import pytest
from simulation import Kind, Windows, World, simulate

QUICK_STEPS = 2_000
CI_SEEDS, CI_STEPS = range(20), 20_000  # nightly: python tests/property/simulation.py --seeds 200
KINDS = [Kind(flight, *drafts) for flight in (1, 2) for drafts in ((0, 0.0), (3, 0.0), (4, 0.5), (5, 0.9))]
WINDOWS: list[Windows] = [(8,), (None, 20), (None, 3, 70)]


@pytest.mark.parametrize("seed", [0, 3])
def test_short_simulation(seed: int) -> None:
    world = simulate(seed, QUICK_STEPS)
    stats = world.scheduler.stats()
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_hits_total > 0
    assert world.num_copies > 0
    assert world.num_forks > 0
    assert {"stop", "length", "string", "abort", "error", "refused"} <= world.ends.keys()
    assert {"interrupted", "restored"} <= world.ends.keys()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_kind_of_executor(kind: Kind) -> None:
    world = simulate(3, QUICK_STEPS // 5, kind)
    assert bool(world.num_accepted) == (kind.accuracy > 0)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_windows(windows: Windows, num_in_flight: int) -> None:
    world = simulate(5, QUICK_STEPS // 4, Kind(num_in_flight, 3, 0.5), windows)
    assert world.ends["length"] > 0


def test_same_seed_same_trace() -> None:
    assert simulate(4, 500).trace == simulate(4, 500).trace != simulate(5, 500).trace


@pytest.mark.slow
def test_long_simulation() -> None:
    ends: Counter[str] = Counter()
    num_preemptions = 0
    for seed in CI_SEEDS:
        world = _simulate_or_tell(seed)
        ends += world.ends
        num_preemptions += world.scheduler.stats().num_preemptions_total
    assert num_preemptions > 10_000
    assert min(ends[reason] for reason in ("stop", "length", "string", "abort", "error", "refused")) > 100
    assert min(ends[event] for event in ("reset", "interrupted", "restored")) > 100


@pytest.mark.slow
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_long_simulation_of_windows(windows: Windows) -> None:
    worlds = [simulate(seed, CI_STEPS // 4, windows=windows) for seed in range(5)]
    assert sum(world.scheduler.stats().num_preemptions_total for world in worlds) > 100


def _simulate_or_tell(seed: int) -> World:
    try:
        return simulate(seed, CI_STEPS)
    except Exception as error:
        raise AssertionError(
            f"python tests/property/simulation.py --first {seed} --seeds 1 shows this again"
        ) from error
