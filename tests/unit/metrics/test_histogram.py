"""Histograms against counting by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.metrics.histogram import Histogram, geometric, one_two_five, quantile

VALUES = st.lists(st.floats(0, 20, allow_nan=False))


@given(VALUES, st.lists(st.floats(0.1, 15), max_size=5))
def test_cumulative_counts_are_those_of_the_values(values: list[float], finer: list[float]) -> None:
    histogram = Histogram("name", "help", [1.0, 2.0, 10.0], finer)
    for value in values:
        histogram.observe(value)
    expected = [(bound, sum(v <= bound for v in values)) for bound in (1.0, 2.0, 10.0, float("inf"))]
    assert histogram.cumulative() == expected
    assert histogram.total == pytest.approx(sum(values))
    assert sum(histogram.counts) == len(values)


@given(st.lists(st.floats(0.000101, 80), min_size=1), st.floats(0, 1))
def test_quantiles_are_as_near_as_the_bounds(values: list[float], share: float) -> None:
    histogram = Histogram("name", "help", geometric(1e-4, 80.0, per_decade=24))
    for value in values:
        histogram.observe(value)
    found = quantile(histogram.bounds, histogram.counts, share)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert found == pytest.approx(exact, rel=0.11)


def test_quantiles_at_the_ends() -> None:
    assert quantile([1.0, 2.0], [0, 0, 0], 0.5) is None
    assert quantile([1.0, 2.0], [0, 0, 3], 0.5) == 2.0  # what lies beyond is not known
    assert quantile([1.0, 2.0], [4, 0, 0], 0.5) == 0.5


def test_bounds() -> None:
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]
    assert one_two_five(3) == [1, 2]
    bounds = geometric(0.001, 1.0, per_decade=2)
    assert bounds == pytest.approx([0.001, 0.001 * 10**0.5, 0.01, 0.01 * 10**0.5, 0.1, 0.1 * 10**0.5, 1.0])
