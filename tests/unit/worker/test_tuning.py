"""What is kept of the fastest way to multiply large matrices, and what happens where it can't be."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.ops.native.library import Target, library
from quire.worker import tuning
from quire.worker.tuning import tune

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels")

TARGET = Target("portable", 1)


class Kernels:
    """A level of so many ways, of which the one called `best` is found to be the fastest."""

    def __init__(self, num_ways: int = 4, best: int = 3) -> None:
        self.num_ways, self.best = num_ways, best
        self.way = self.measured = 0

    def quire_tune(self, _level: int, _num_threads: int, way: int) -> int:
        if self.num_ways < 2 or way >= self.num_ways:
            return -1
        self.measured += way < 0
        self.way = self.best if way < 0 else way
        return self.way


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("QUIRE_TUNING", raising=False)
    return tmp_path / "quire/tuning"


def started(monkeypatch: pytest.MonkeyPatch, kernels: Kernels, target: Target = TARGET) -> Kernels:
    """The kernels after a start."""
    monkeypatch.setattr(tuning, "loaded_library", lambda: SimpleNamespace(quire_tune=kernels.quire_tune))
    tune(target)
    return kernels


def test_a_machine_measures_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (started(monkeypatch, Kernels()) for _ in range(2))
    assert (first.way, first.measured) == (3, 1)
    assert (second.way, second.measured) == (3, 0)
    assert [path.read_text() for path in kept.iterdir()] == ["3"]


def test_another_processor_number_of_threads_or_library_measures_its_own(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started(monkeypatch, Kernels()).measured
    assert started(monkeypatch, Kernels(), Target("portable", 2)).measured
    monkeypatch.setattr(tuning, "processor", lambda: "another")
    assert started(monkeypatch, Kernels()).measured
    built = tmp_path / "library"
    built.write_bytes(b"built anew")
    monkeypatch.setattr(tuning, "library_path", lambda: built)
    assert started(monkeypatch, Kernels(best=2)).way == 2
    assert len(list(kept.iterdir())) == 4


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"fast", b"4", b"99999", b"3" * 5000])
def test_what_is_damaged_or_another_s_is_measured_anew(
    kept: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, Kernels())
    (path,) = kept.iterdir()
    path.write_bytes(content)
    assert started(monkeypatch, Kernels()).measured
    assert path.read_text() == "3"


def test_nothing_is_measured_where_nothing_can_be_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.parent.write_text("no folder")
    kernels = started(monkeypatch, Kernels())
    assert (kernels.way, kernels.measured) == (0, 0)


def test_a_user_without_a_home_and_one_who_says_so_use_the_first_way(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, Kernels())
    monkeypatch.setenv("QUIRE_TUNING", "0")
    assert started(monkeypatch, Kernels()).way == 0
    monkeypatch.delenv("QUIRE_TUNING")
    monkeypatch.setattr(tuning, "cache_folder", lambda: None)
    assert started(monkeypatch, Kernels()).way == 0


def test_a_level_of_one_way_leaves_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not started(monkeypatch, Kernels(num_ways=1)).measured
    assert not kept.exists()


def test_of_two_that_measure_at_once_each_uses_what_it_found(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Kernels(best=1)

    class Slower(Kernels):
        def quire_tune(self, level: int, num_threads: int, way: int) -> int:
            if way < 0:
                started(monkeypatch, other)
            return super().quire_tune(level, num_threads, way)

    kernels = started(monkeypatch, Slower(best=2))
    assert (kernels.way, other.way, other.measured) == (2, 1, 1)
    assert [path.read_text() for path in kept.iterdir()] == ["2"]


@pytest.mark.parametrize("name", ["replace", "write"])
def test_a_measurement_that_fails_to_be_kept_is_used_and_leaves_nothing(
    kept: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **_options: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, name, refuse)
    assert started(monkeypatch, Kernels()).way == 3
    assert os.listdir(kept) == []
