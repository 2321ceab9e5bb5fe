"""Histograms against counting by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.metrics.histogram import Histogram

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
