"""Selection and draws against a plain, sorting twin in Python integers."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling.random import random_bits
from quire.sampling.select import DrawTable, candidates, draw, ids_before, kept_weights, leading_ids, race_times, weigh

ORDER_LIMIT = 1024  # up to this top_k the package lists the tokens; beyond, it draws and checks


def sorted_ids(logits: np.ndarray) -> list[int]:
    """All tokens that are not masked: larger logit first, then lower id."""
    return sorted(np.flatnonzero(logits > -np.inf).tolist(), key=lambda i: (-float(logits[i]), i))


def plain_weights(logits: np.ndarray, temperature: float) -> dict[int, int]:
    """Token -> integer weight, in order."""
    order = sorted_ids(logits)
    return dict(zip(order, weigh(logits[order], float(logits.max()), temperature).tolist(), strict=True))


def plain_survivors(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[list[int], list[int]]:
    """(tokens left by min_p and top_k, those of them left by top_p), both in order."""
    weights = plain_weights(logits, temperature)
    kept = [i for i in weights if weights[i] >= min_p * 2**40][:top_k]
    total, running, left = sum(weights[i] for i in kept), 0, []
    for i in kept:
        left.append(i)
        running += weights[i]
        if running >= top_p * total:
            break
    return kept, left if top_p < 1 else kept


def plain_mix(word: int) -> int:
    word = (word ^ word >> 16) * 0x7FEB352D & 0xFFFFFFFF
    word = (word ^ word >> 15) * 0x846CA68B & 0xFFFFFFFF
    return word ^ word >> 16


def plain_time(number: int, bits: int) -> float:
    word = plain_mix((number * 0x9E3779B9 + bits) & 0xFFFFFFFF)
    word = plain_mix(word + (bits >> 32) & 0xFFFFFFFF)
    coin = plain_mix(word + 0x9E3779B9 & 0xFFFFFFFF) >> 8 | 1
    return -math.log2(1 - ((word >> 1) + 0.5) / 2**32) + 24 - coin.bit_length()


def plain_race(weights: dict[int, int], bits: int) -> int:
    return min((number for number in weights if weights[number]), key=lambda n: plain_time(n, bits) / weights[n])


def plain_draw(
    weights: dict[int, int], kept: list[int], left: list[int], listed: bool, bits_of: Callable[[int], int]
) -> int:
    pool, inside, attempt = left if listed else kept, set(left), 0
    while True:
        parts: dict[int, int] = {}
        for i in pool:
            parts[2**31 + i // 512] = parts.get(2**31 + i // 512, 0) + weights[i]
        bits = bits_of(attempt)
        part = plain_race(parts, bits) - 2**31
        token = plain_race({i: weights[i] for i in pool if i // 512 == part}, bits)
        if token in inside:
            return token
        pool, attempt = kept[: kept.index(token)], attempt + 1


def random_row(generator: np.random.Generator, size: int, kind: str) -> np.ndarray:
    if kind == "ties":  # few distinct values, as bf16 logits have
        row = generator.integers(-6, 3, size).astype(np.float32)
    elif kind == "equal":
        row = np.full(size, 1.5, np.float32)
    elif kind == "masked":
        row = generator.standard_normal(size).astype(np.float32) * 3
        row[generator.random(size) < 0.9] = -np.inf
        row[size // 2] = 0.0
    elif kind == "peaked":
        row = generator.standard_normal(size).astype(np.float32)
        row[generator.integers(size)] = 30.0
    else:
        row = generator.standard_normal(size).astype(np.float32) * 3
    return row


rows = st.builds(
    lambda seed, size, kind: random_row(np.random.default_rng(seed), size, kind),
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 7, 100, 1024, 1025, 3000, 9001]),
    st.sampled_from(["plain", "ties", "equal", "masked", "peaked"]),
)
limits = st.tuples(
    st.sampled_from([0.01, 0.7, 1.0, 2.0]),
    st.sampled_from([1, 2, 5, 64, 1024, 1025, 2500, 10**9]),
    st.sampled_from([1e-6, 0.1, 0.5, 0.95, 1.0 - 2**-53, 1.0]),
    st.sampled_from([0.0, 1e-3, 0.3, 1.0]),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows, limits, st.integers(0, 2**64 - 1))
def test_a_draw_equals_the_plain_twins(row, limit, seed) -> None:
    temperature, top_k, top_p, min_p = limit
    top_k = min(top_k, len(row))
    table, mass = candidates(row, float(row.max()), temperature, top_k, top_p, min_p)
    weights = plain_weights(row, temperature)
    kept, left = plain_survivors(row, temperature, top_k, top_p, min_p)
    for position in range(3):

        def bits_of(attempt: int, position: int = position) -> int:
            return random_bits(seed, 0, position, attempt)

        token = draw(table, mass, row, bits_of)
        assert token == plain_draw(weights, kept, left, top_k <= ORDER_LIMIT, bits_of)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows, limits)
def test_the_survivors_are_exactly_the_plain_twins(row, limit) -> None:
    temperature, top_k, top_p, min_p = limit
    row = row[:1500]
    if row.max() == -np.inf:
        return
    top_k = min(top_k, len(row))
    kept, left = plain_survivors(row, temperature, top_k, top_p, min_p)
    table, mass = candidates(row, float(row.max()), temperature, top_k, top_p, min_p)
    ids = np.flatnonzero(table.weights) if table.ids is None else table.ids[table.weights > 0]
    if mass:  # the table holds what top_k and min_p left; top_p asks for each token whether it is in
        assert top_k > ORDER_LIMIT
        ids = np.array([i for i in ids if int(table.weights[ids_before(row, i)].sum()) < mass])
    weights = weigh(row, float(row.max()), temperature)
    assert ids.tolist() == sorted(i for i in left if weights[i] > 0)
    in_all = kept_weights(row, float(row.max()), temperature, top_k, top_p, min_p)
    assert np.flatnonzero(in_all).tolist() == ids.tolist()
    assert in_all[ids].tolist() == weights[ids].tolist()
    assert len(left) >= 1
    assert set(left) <= set(kept)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows, st.sampled_from([1, 2, 5, 64, 1024, 1025, 2999, 10**9]))
def test_leading_ids_are_a_stable_sorts(row, k) -> None:
    assert leading_ids(row, k).tolist() == sorted_ids(row)[:k]


def test_leading_ids_at_the_size_of_a_real_vocabulary() -> None:
    row = np.random.default_rng(3).standard_normal(151_936).astype(np.float32)
    order = np.argsort(-row, kind="stable")
    for k in (1, 20, 64, 1024, 5000):
        assert (leading_ids(row, k) == order[:k]).all()
    coarse = np.round(row * 2)  # thousands of ties at every bound
    order = np.argsort(-coarse, kind="stable")
    for k in (1, 64, 1024, 5000):
        assert (leading_ids(coarse, k) == order[:k]).all()


def test_what_weighs_nothing_is_never_drawn() -> None:
    for size in (4, 5000):
        weights = np.zeros(size, np.int64)
        weights[1], weights[size - 2] = 5, 7
        table = DrawTable(None, weights)
        assert table.total == 12
        assert {table.pick(random_bits(1, 0, position)) for position in range(100)} == {1, size - 2}


def test_times_are_exponential() -> None:
    times = np.concatenate([race_times(np.arange(50_000), random_bits(3, 0, p)) for p in range(4)]) * math.log(2)
    assert times.min() > 0
    assert times.mean() == pytest.approx(1, abs=0.01)
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        share = (times < -math.log(1 - quantile)).mean()
        assert share == pytest.approx(quantile, abs=4 * math.sqrt(quantile * (1 - quantile) / len(times)))


def test_what_is_alike_draws_alike() -> None:
    """Two distributions give the same token for the same bits nearly as often as any two draws could."""
    generator = np.random.default_rng(0)
    row = generator.standard_normal(4096).astype(np.float32) * 3
    near = row + generator.standard_normal(4096).astype(np.float32) * 0.7
    ours, theirs = (weigh(one, float(one.max())) for one in (row, near))
    optimum = np.minimum(ours / ours.sum(), theirs / theirs.sum()).sum()
    tables = DrawTable(None, ours), DrawTable(None, theirs)
    seeds = [random_bits(0, 0, position) for position in range(1000)]
    same = sum(tables[0].pick(bits) == tables[1].pick(bits) for bits in seeds) / len(seeds)
    assert optimum * 0.8 < same < optimum + 0.05


def test_weights_depend_on_the_logit_alone() -> None:
    """Same bits wherever the element stands: vector body, tail, any alignment."""
    row = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 8
    maximum = float(row.max())
    whole = weigh(row, maximum, 0.7)
    for start, stop in [(0, 1), (3, 20), (1, 1000), (17, 34), (999, 1000)]:
        assert (weigh(row[start:stop], maximum, 0.7) == whole[start:stop]).all()
    assert (weigh(row[::-1], maximum, 0.7) == whole[::-1]).all()


def test_weights_are_those_of_exp_and_the_same_on_every_machine() -> None:
    row = -np.concatenate([[0.0], np.geomspace(1e-30, 60, 5000), [1e30, np.inf]]).astype(np.float32)
    for temperature in (0.01, 0.7, 1.0, 2.0):
        weights = weigh(row + np.float32(5), 5.0, temperature)
        exact = np.exp((row + np.float32(5) - np.float32(5)).astype(np.float64) / temperature) * 2**40
        assert weights[0] == 2**40 == weights.max()
        assert (abs(weights - exact) <= 3e-6 * exact + 1).all()
    row = -np.array([0.0, 0.1, 1.0, 7.3, 20.0, 27.5, 30.0], np.float32)
    assert weigh(row, 0.0, 0.9).tolist() == [2**40, 983886135296, 361951526912, 330056896, 245, 0, 0]


@pytest.mark.parametrize("top_p", [0.1, 0.2, 0.3, 0.5, 0.7, 0.9])
def test_top_p_of_equal_tokens_counts_them(top_p: float) -> None:
    table, mass = candidates(np.zeros(10, np.float32), 0.0, 1.0, 10, top_p, 0.0)
    assert mass == 0
    assert table.ids is not None
    assert table.ids.tolist() == list(range(round(10 * top_p)))


def test_survivors_agree_with_a_float64_softmax() -> None:
    generator = np.random.default_rng(5)
    for size in (50, 4000):
        for _ in range(10):
            row = generator.standard_normal(size).astype(np.float32) * 4
            order = np.argsort(-row, kind="stable")
            probabilities = np.exp(row[order].astype(np.float64) / 0.8)
            cumulative = np.cumsum(probabilities / probabilities.sum())
            count = int(np.searchsorted(cumulative, 0.9)) + 1
            if abs(cumulative[count - 1] - 0.9) < 1e-5 or abs(cumulative[count - 2] - 0.9) < 1e-5:
                continue  # the two arithmetics may differ at the very edge
            _, left = plain_survivors(row, 0.8, size, 0.9, 0.0)
            assert left == order[:count].tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (8, 0.8, 0.1)]
)
@pytest.mark.parametrize("size", [12, pytest.param(2000, marks=pytest.mark.slow)])  # the second goes by draw and check
def test_frequencies_fit_the_probabilities(top_k: int, top_p: float, min_p: float, size: int) -> None:
    row = np.full(size, -20.0, np.float32)
    places = np.random.default_rng(1).permutation(size)[:12]
    row[places] = np.linspace(0, -3, 12, dtype=np.float32)
    top_k = top_k or size
    _, left = plain_survivors(row, 0.9, top_k, top_p, min_p)
    left = [i for i in left if row[i] > -20]
    chances = np.exp(row[left].astype(np.float64) / 0.9)
    chances /= chances.sum()
    table, mass = candidates(row, 0.0, 0.9, top_k, top_p, min_p)
    num_draws = 4000
    drawn = [draw(table, mass, row, lambda a, p=p: random_bits(42, 0, p, a)) for p in range(num_draws)]
    counts = np.array([drawn.count(i) for i in left])
    assert counts.sum() >= num_draws - 1  # the tail at -20 has 4e-7 of the mass
    freedom = len(left) - 1
    chi_square = float(((counts - num_draws * chances) ** 2 / (num_draws * chances)).sum())
    # Wilson and Hilferty's bound, met by chance in 9,999 of 10,000 seeds
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def test_a_token_that_would_only_exceed_the_mass_is_never_drawn() -> None:
    row = np.full(2000, -np.inf, np.float32)
    row[[700, 1900]] = 1.0
    table, mass = candidates(row, 1.0, 1.0, 2000, 0.5, 0.0)
    assert {draw(table, mass, row, lambda a, p=p: random_bits(1, 0, p, a)) for p in range(50)} == {700}
    table, mass = candidates(row, 1.0, 1.0, 2000, 0.500001, 0.0)
    assert {draw(table, mass, row, lambda a, p=p: random_bits(1, 0, p, a)) for p in range(50)} == {700, 1900}
