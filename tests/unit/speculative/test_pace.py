"""How many drafts: by acceptance, batch size and the cost of steps."""

from collections.abc import Callable
from typing import Any

import pytest

from quire.config.draft_tree import DraftTree
from quire.config.speculative import SpeculativeConfig
from quire.speculative.base import DraftedSequence
from quire.speculative.ngram import NgramProposer
from quire.speculative.pace import Pace, StepCosts
from tests.tokens import tokens_of

FLAT = {1: 1.0, 16: 1.0, 17: 2.0, 32: 2.0, 33: 3.0, 48: 3.0, 1008: 63.0}
LINEAR = {1: 1.0, 2: 2.0}
FREE = StepCosts({1: 0.0, 2: 0.0})


def rows(count: int) -> list[DraftedSequence]:
    return [DraftedSequence(i, tokens_of([1])) for i in range(count)]


def chosen(pace: Pace, some: list[DraftedSequence], most: int = 8) -> list[int]:
    pace.choose(some, len(some), most)
    return [row.max_drafts for row in some]


def test_costs_lie_on_lines_between_what_was_measured() -> None:
    costs = StepCosts({1: 1.0, 3: 2.0, 4: 4.0}, host=0.5)
    assert [costs(n) for n in (1, 2, 3, 4, 5, 6)] == [1.5, 2.0, 2.5, 4.5, 6.5, 8.5]


def test_as_many_as_are_free() -> None:
    pace = Pace(StepCosts(FLAT), FREE)
    assert chosen(pace, rows(1), 8) == [8]
    assert chosen(pace, rows(1), 32) == [15]
    assert sum(chosen(pace, rows(4), 8)) == 12
    assert chosen(pace, rows(16), 8) == [0] * 16


def test_none_where_each_costs_a_step() -> None:
    assert chosen(Pace(StepCosts(LINEAR), FREE), rows(2)) == [0, 0]


@pytest.mark.parametrize(("rate", "least", "most"), [(1.0, 6, 8), (0.0, 0, 1)])
def test_acceptance_decides(rate: float, least: int, most: int) -> None:
    pace, some = Pace(StepCosts({1: 1.0, 9: 3.0}), FREE), rows(1)
    for _ in range(40):
        pace.observe(some[0], 4, round(4 * rate))
    (count,) = chosen(pace, some)
    assert least <= count <= most


def test_of_a_tree_so_many_levels() -> None:
    tree = DraftTree.read(str([(0,), (1,), (2,), *((i, 0) for i in range(3)), *((i, 0, 0) for i in range(3))]))
    costs = StepCosts(FLAT)
    assert chosen(Pace(costs, FREE, tree=tree), rows(1)) == [9]
    assert chosen(Pace(costs, FREE, tree=tree), rows(2)) == [6, 6]
    assert chosen(Pace(costs, FREE, tree=tree), rows(4)) == [3] * 4
    assert chosen(Pace(costs, FREE, tree=tree), rows(16)) == [0] * 16
    pace, some = Pace(costs, FREE, tree=tree), rows(1)
    for _ in range(200):
        pace.observe(some[0], 3, 0)
    tried = [chosen(pace, some)[0] for _ in range(300)]
    assert set(tried) <= {0, 3, 9}, "whole levels"
    pace.drafted([9], 1, 0.1)


def test_those_that_are_accepted_get_what_there_is() -> None:
    pace, some = Pace(StepCosts(FLAT), FREE), rows(4)
    for _ in range(30):
        pace.observe(some[0], 4, 4)
        for row in some[1:]:
            pace.observe(row, 4, 0)
    counts = chosen(pace, some, 8)
    assert counts[0] == 8
    assert sum(counts) <= 12


def run(pace: Pace, row: DraftedSequence, steps: int, costs: StepCosts, accepts: int, making: float = 0.0) -> float:
    """Seconds and tokens of so many steps, of whose drafts `accepts` are accepted: the speed, of plain decoding's."""
    seconds = tokens = 0.0
    for _ in range(steps):
        (count,) = chosen(pace, [row], 4)
        accepted = min(count, accepts)
        if count:
            pace.drafted([count], 1, making)
            pace.observe(row, count, accepted)
        seconds += costs(1 + count) + (making if count else 0.0)
        tokens += 1 + accepted
    return tokens / seconds * costs(1)


def test_what_failed_is_tried_again_ever_less() -> None:
    pace, (row,) = Pace(StepCosts({1: 1.0, 2: 1.2, 33: 7.4}), FREE), rows(1)
    tried = []
    for step in range(600):
        (count,) = chosen(pace, [row])
        if count:
            pace.drafted([count], 1, 0.0)
            pace.observe(row, count, 0)
            tried += [step] * (count == 1)
    gaps = [b - a for a, b in zip(tried, tried[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 128


@pytest.mark.parametrize("slope", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("making", [0.0, 0.3, 2.0])
def test_bad_drafts_cost_next_to_nothing(slope: float, making: float) -> None:
    costs = StepCosts({1: 1.0, 2: 1.0 + slope})
    pace = Pace(StepCosts({1: 1.0, 2: 1.0 + slope}), StepCosts({1: making, 2: making}))
    assert run(pace, rows(1)[0], 400, costs, 0, making) > 0.97
    for row in rows(8):  # who comes later profits from what the first has learnt
        assert run(pace, row, 64, costs, 0, making) > 0.97


def test_a_proposer_that_takes_longer_than_was_thought_is_found_out() -> None:
    costs, pace = StepCosts({1: 1.0, 2: 1.1}), Pace(StepCosts({1: 1.0, 2: 1.1}), StepCosts({1: 0.01, 2: 0.01}))
    (row,) = rows(1)
    run(pace, row, 800, costs, 1, making=3.0)
    assert run(pace, row, 200, costs, 1, making=3.0) > 0.97


def test_good_drafts_gain() -> None:
    costs = StepCosts({1: 1.0, 9: 1.8})
    pace = Pace(StepCosts({1: 1.0, 9: 1.8}), StepCosts({1: 0.1, 2: 0.1}), True)
    assert run(pace, rows(1)[0], 100, costs, 4, making=0.4) > 2.5


class Reading(NgramProposer):
    """Has as much to read as it is told."""

    num_missed = 0

    def num_behind(self, row: DraftedSequence) -> int:
        return self.num_missed


def test_what_would_have_to_be_read_first_is_weighed() -> None:
    proposer = Reading(SpeculativeConfig("ngram"))
    pace = Pace(StepCosts({1: 1.0, 9: 1.4}), StepCosts({1: 0.05, 2: 0.1}), True)
    (row,) = rows(1)
    proposer.num_missed = 40  # 2 steps' worth: it is soon earned back
    pace.choose([row], 1, 4, proposer)
    assert row.max_drafts > 0
    proposer.num_missed = 4000
    pace.choose([row], 1, 4, proposer)
    assert row.max_drafts == 0
    row.tokens = tokens_of([1], [1] * 2000)  # who has gone on for long may go on for as long
    pace.choose([row], 1, 4, proposer)
    assert row.max_drafts > 0


def test_steps_teach_what_they_cost() -> None:
    costs = StepCosts({1: 1.0, 5: 1.4})
    for _ in range(400):
        costs.learn(1, 3.0)
        costs.learn(5, 9.0)
    assert costs(1) == pytest.approx(3.0, rel=0.1)
    assert costs(5) == pytest.approx(9.0, rel=0.1)


def test_a_step_without_drafts_costs_little(count_bytecodes: Callable[[Callable[[], Any]], int]) -> None:
    pace, (row,) = Pace(StepCosts(LINEAR), FREE), rows(1)
    for _ in range(20):
        chosen(pace, [row])
    assert count_bytecodes(lambda: pace.choose([row], 1, 8)) < 300


def test_the_choice_follows_from_the_numbers() -> None:
    def several() -> list[list[int]]:
        pace, some = Pace(StepCosts(FLAT), StepCosts({1: 0.01, 2: 0.01}), True), rows(3)
        found = []
        for step in range(50):
            found.append(chosen(pace, some))
            for i, row in enumerate(some):
                if row.max_drafts:
                    pace.drafted([row.max_drafts], 1, 0.01 * step)
                    pace.observe(row, row.max_drafts, (step + i) % (row.max_drafts + 1))
        return found

    assert several() == several()


def test_choices_are_forgotten_though_no_step_teaches() -> None:
    """As where each step computes a part of some prompt, for days."""
    pace = Pace(StepCosts(FLAT), FREE)
    for step in range(500):
        some = rows(1 + step % 7)
        for i, row in enumerate(some):
            pace.observe(row, 8, (step * (i + 3)) % 9)
        pace.choose(some, len(some), 8)
        assert len(pace._choices) <= 64


def test_nothing_is_asked_again_while_drafts_cannot_pay() -> None:
    pace, some = Pace(StepCosts(LINEAR), FREE), rows(2)
    assert not pace.rests(2)
    assert chosen(pace, some) == [0, 0]
    rested = 0
    while pace.rests(2):
        rested += 1
    assert rested > 30
    chosen(pace, some)
    assert not pace.rests(3), "another batch is another matter"
    chosen(pace, some)
    pace.wake()
    assert not pace.rests(2), "somebody came new"


def test_a_row_that_failed_is_tried_after_as_many_steps_of_rest() -> None:
    pace, (row,) = Pace(StepCosts({1: 1.0, 2: 1.2, 33: 7.4}), FREE), rows(1)
    for _ in range(40):
        pace.observe(row, 4, 0)
    tried = []
    for step in range(400):
        if not pace.rests(1) and chosen(pace, [row])[0]:
            pace.drafted([row.max_drafts], 1, 0.0)
            pace.observe(row, row.max_drafts, 0)
            tried.append(step)
    gaps = [b - a for a, b in zip(tried, tried[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert {8, 16, 32, 64} <= {gap - gap % 8 for gap in gaps} | {8}
    assert len(tried) < 10


def test_steps_before_a_trial_are_known_and_others_are_not() -> None:
    pace, (row,) = Pace(StepCosts({1: 1.0, 2: 1.2, 33: 7.4}), FREE), rows(1)
    for _ in range(40):
        pace.observe(row, 4, 0)
    chosen(pace, [row])
    known = []
    while pace.rests(1):
        known.append(pace.must_know(1))
    assert known == sorted(known), "the last ones"
    assert known[-1]
    hopeless = Pace(StepCosts(LINEAR), FREE)
    chosen(hopeless, [row])
    while hopeless.rests(1):
        assert not hopeless.must_know(1)


def test_what_drafts_cost_the_host_is_learnt() -> None:
    pace, some = Pace(StepCosts(FLAT, host=0.1), FREE), rows(1)
    assert chosen(pace, some, 1) == [1]
    for _ in range(600):
        pace.learn_host(0.1, 0)
        pace.learn_host(3.0, 1)
    assert pace.costs.host == pytest.approx(0.1, rel=0.1)
    pace = Pace(StepCosts(FLAT, host=0.1), FREE)
    for _ in range(600):
        pace.learn_host(3.0, 1)
    assert chosen(pace, rows(1), 1) == [0], "a draft that saves a step at best, and costs the host three"
