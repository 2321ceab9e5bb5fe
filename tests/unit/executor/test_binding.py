"""Which cores each rank gets."""

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.executor.binding import cpus_of_ranks


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of two cores of two threads, numbered as Linux does: CPU 4 is core 0's second thread."""
    for cpu in range(8):
        core, node = cpu % 4, cpu % 4 // 2
        folder = tmp_path / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{node}").mkdir()
        (folder / "topology/physical_package_id").write_text(f"{node}\n")
        (folder / "topology/core_id").write_text(f"{core % 2}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


@pytest.mark.parametrize(
    ("bind", "num_ranks", "expected"),
    [
        ("auto", 1, [[]]),
        ("auto", 2, [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("auto", 3, [[0, 4], [1, 5], [2, 6, 3, 7]]),
        ("auto", 4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("auto", 5, [[]] * 5),
        ("none", 2, [[], []]),
        ("0-1|2-3", 2, [[0, 1], [2, 3]]),
        ("0,2|5-7,1", 2, [[0, 2], [5, 6, 7, 1]]),
    ],
)
def test_shares(machine: Path, bind: str, num_ranks: int, expected: list[list[int]]) -> None:
    assert cpus_of_ranks(bind, num_ranks, machine) == expected


@pytest.mark.parametrize("bind", ["0-1", "0|1|2", "0-1|", "0-1|x", "0|8", "", "0|99999999999"])
def test_lists_that_are_none_are_refused(machine: Path, bind: str) -> None:
    with pytest.raises(ConfigError, match=r"cpu_bind=.* must be 'auto', 'none' or a list of CPUs for each of 2 ranks"):
        cpus_of_ranks(bind, 2, machine)
