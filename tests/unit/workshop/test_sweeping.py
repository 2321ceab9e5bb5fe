"""Cases within one test: each two values meet, every night all of them do, and a failure tells its case."""

import itertools

import pytest
from sweeping import each

AXES = {"size": range(4), "kind": "abc", ("low", "high"): [(0, 1), (0, 2)]}


def met(monkeypatch: pytest.MonkeyPatch, nightly: str) -> list[tuple[str, int, str, int, int]]:
    monkeypatch.setenv("QUIRE_NIGHTLY", nightly)
    found: list[tuple[str, int, str, int, int]] = []

    @each(AXES)
    def collect(fixture: str, size: int, kind: str, low: int, high: int) -> None:
        found.append((fixture, size, kind, low, high))

    collect(fixture="given")
    return found


def test_each_two_values_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    found = met(monkeypatch, "0")
    assert {(size, kind) for _, size, kind, _, _ in found} == {*itertools.product(range(4), "abc")}
    assert {(size, high) for _, size, _, _, high in found} == {*itertools.product(range(4), (1, 2))}
    assert len(found) < 4 * 3 * 2
    assert {(fixture, low) for fixture, _, _, low, _ in found} == {("given", 0)}


def test_all_meet_each_night(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({*met(monkeypatch, "1")}) == 4 * 3 * 2


def test_a_failure_tells_its_case() -> None:
    @each({"size": [1, 2], "kind": ["x"]})
    def fail(size: int, kind: str) -> None:
        assert size == 1

    with pytest.raises(AssertionError) as caught:
        fail()
    assert caught.value.__notes__ == ["in the case of size=2, kind=x"]


@each({"size": [1, 2]})
def test_fixtures_are_still_given(size: int, request: pytest.FixtureRequest) -> None:
    assert request.node.name == "test_fixtures_are_still_given"
