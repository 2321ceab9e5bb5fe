"""The scheduler under random load, step by step against what each request would yield alone (see `simulation`)."""

from collections import Counter

import pytest
from simulation import World, simulate

QUICK_STEPS = 2_000
CI_SEEDS, CI_STEPS = range(20), 20_000  # nightly: python tests/property/simulation.py --seeds 200


@pytest.mark.parametrize("seed", [0, 1])
def test_short_simulation(seed: int) -> None:
    world = simulate(seed, QUICK_STEPS)
    assert world.scheduler.num_preemptions > 0
    assert world.executor.copies > 0
    assert world.scheduler.prefix_cache_hits > 0
    assert {"stop", "length", "string", "abort", "error", "refused"} <= world.ends.keys()


def test_same_seed_same_trace() -> None:
    assert simulate(4, 500).trace == simulate(4, 500).trace != simulate(5, 500).trace


@pytest.mark.slow
def test_long_simulation() -> None:
    ends: Counter[str] = Counter()
    num_preemptions = 0
    for seed in CI_SEEDS:
        world = _simulate_or_tell(seed)
        ends += world.ends
        num_preemptions += world.scheduler.num_preemptions
    assert num_preemptions > 10_000
    assert min(ends[reason] for reason in ("stop", "length", "string", "abort", "error", "refused", "reset")) > 100


def _simulate_or_tell(seed: int) -> World:
    try:
        return simulate(seed, CI_STEPS)
    except Exception as error:
        raise AssertionError(
            f"python tests/property/simulation.py --first {seed} --seeds 1 shows this again"
        ) from error
