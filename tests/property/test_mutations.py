"""The simulation notices bugs: each one of `mutants` is planted, and has to be found within a short run.

What is not noticed here would not be noticed if somebody made that mistake. The same runs pass without a bug.
"""

import pytest
from mutants import MUTANTS
from simulation import Scenario, run
from world import Kind

NUM_STEPS = 1_000
SCENARIOS = [
    Scenario(0, NUM_STEPS),
    Scenario(3, NUM_STEPS, Kind(2, 4, 0.5)),
    Scenario(5, NUM_STEPS, windows=(None, 20)),
    Scenario(6, NUM_STEPS, Kind(2)),
    Scenario(5, NUM_STEPS, hosts=4),
    Scenario(0, NUM_STEPS, Kind(2, 3, 0.5), hosts=4, disturbed=0.15),
    Scenario(40, NUM_STEPS),
]

FURTHER = [Scenario(seed, 2 * NUM_STEPS) for seed in range(20)]  # those of test_long_simulation
FURTHER += [Scenario(seed, NUM_STEPS, Kind(2, 3, 0.5), hosts=4, disturbed=0.15) for seed in range(10)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_nothing_is_noticed_where_nothing_is_wrong(scenario: Scenario) -> None:
    run(scenario)


# They come to light in further scenarios only.
LATE = ["a_block_that_is_read_to_is_forgotten", "what_could_not_be_read_is_believed", "a_grammar_wakes_the_first_only"]


@pytest.mark.parametrize(
    "mutant", [pytest.param(name, marks=pytest.mark.slow) if name in LATE else name for name in MUTANTS]
)
def test_a_planted_bug_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    for scenario in SCENARIOS + FURTHER:
        try:
            run(scenario)
        except Exception:
            return
    pytest.fail(f"{mutant} went unnoticed")
