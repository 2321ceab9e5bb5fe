"""How many drafts: by acceptance, batch size and the cost of steps."""

import pytest

from quire.sampling.tokens import SequenceTokens
from quire.speculative.base import DraftedSequence
from quire.speculative.pace import Pace, StepCosts

FLAT = {1: 1.0, 16: 1.0, 17: 2.0, 32: 2.0, 33: 3.0, 48: 3.0, 1008: 63.0}
LINEAR = {1: 1.0, 2: 2.0}


def rows(count: int) -> list[DraftedSequence]:
    return [DraftedSequence(i, SequenceTokens.of([1])) for i in range(count)]


def chosen(pace: Pace, some: list[DraftedSequence], most: int = 8) -> list[int]:
    pace.choose(some, len(some), most)
    return [row.max_drafts for row in some]


def test_costs_lie_on_lines_between_what_was_measured() -> None:
    costs = StepCosts({1: 1.0, 3: 2.0, 4: 4.0}, host=0.5)
    assert [costs(n) for n in (1, 2, 3, 4, 5, 6)] == [1.5, 2.0, 2.5, 4.5, 6.5, 8.5]


def test_as_many_as_are_free() -> None:
    pace = Pace(StepCosts(FLAT))
    assert chosen(pace, rows(1), 8) == [8]
    assert chosen(pace, rows(1), 32) == [15]
    assert sum(chosen(pace, rows(4), 8)) == 12
    assert chosen(pace, rows(16), 8) == [0] * 16


def test_none_where_each_costs_a_step() -> None:
    assert chosen(Pace(StepCosts(LINEAR)), rows(2)) == [0, 0]


@pytest.mark.parametrize(("rate", "least", "most"), [(1.0, 6, 8), (0.0, 0, 1)])
def test_acceptance_decides(rate: float, least: int, most: int) -> None:
    pace, some = Pace(StepCosts({1: 1.0, 9: 3.0})), rows(1)
    for _ in range(40):
        pace.observe(some[0], 4, round(4 * rate))
    (count,) = chosen(pace, some)
    assert least <= count <= most


def test_those_that_are_accepted_get_what_there_is() -> None:
    pace, some = Pace(StepCosts(FLAT)), rows(4)
    for _ in range(30):
        pace.observe(some[0], 4, 4)
        for row in some[1:]:
            pace.observe(row, 4, 0)
    counts = chosen(pace, some, 8)
    assert counts[0] == 8
    assert sum(counts) <= 12


def test_what_failed_is_tried_again_ever_less() -> None:
    pace, (row,) = Pace(StepCosts(LINEAR)), rows(1)
    tried = []
    for step in range(400):
        if chosen(pace, [row]) == [1]:
            tried.append(step)
            pace.observe(row, 1, 0)
    gaps = [b - a for a, b in zip(tried, tried[1:], strict=False)]
    assert gaps == [32, 64, 128]


def test_the_choice_follows_from_the_numbers() -> None:
    def run() -> list[list[int]]:
        pace, some = Pace(StepCosts(FLAT), 0.01), rows(3)
        found = []
        for step in range(50):
            found.append(chosen(pace, some))
            for i, row in enumerate(some):
                if row.max_drafts:
                    pace.observe(row, row.max_drafts, (step + i) % (row.max_drafts + 1))
        return found

    assert run() == run()
