"""The pace of steps, as it is learnt: exact where steps follow a line, sensible where they don't."""

import random

import pytest

from quire.scheduler.policies.pace import Pace


def test_a_line_is_found_and_followed_when_it_changes() -> None:
    pace, rng = Pace(), random.Random(1)
    assert not pace.is_known
    for fixed, per_token in ((0.01, 0.001), (0.05, 0.0002)):
        for _ in range(400):
            num_tokens = rng.randrange(1, 500)
            pace.observe(num_tokens, fixed + per_token * num_tokens)
        assert pace.is_known
        assert pace.seconds(100) == pytest.approx(fixed + per_token * 100, rel=0.02)
        assert pace.tokens(pace.seconds(70)) == pytest.approx(70)


def test_equal_steps_say_nothing_of_a_token() -> None:
    pace = Pace()
    for _ in range(10):
        pace.observe(8, 0.02)
    assert pace.seconds(1) == pace.seconds(8) == pytest.approx(0.02)
    assert pace.tokens(0.02) == float("inf")
    assert pace.tokens(0.01) == 0.0


def test_neither_part_is_negative() -> None:
    steep, falling = Pace(), Pace()
    for num_tokens in (10, 20, 40, 80):
        steep.observe(num_tokens, 0.001 * (num_tokens - 9))
        falling.observe(num_tokens, 0.1 - 0.001 * num_tokens)
    assert steep.seconds(0) == 0.0
    assert 0 < steep.seconds(10) < steep.seconds(80)
    assert falling.seconds(10) == falling.seconds(80) > 0
