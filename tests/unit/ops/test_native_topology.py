"""How many threads compute by default, on machines that Linux describes below a folder."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quire.ops.native.library import default_num_threads, library, loaded_library

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels")


def num_cores(root: Path, cpus: Sequence[int]) -> int:
    function = loaded_library().quire_num_cores
    return function(os.fsencode(root), (ctypes.c_int32 * len(cpus))(*cpus), len(cpus))


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(root: Path, cores: Sequence[int], **facts: Sequence[object]) -> range:
    """The CPUs of a machine: the core of each, and what other files of theirs hold."""
    for cpu, core in enumerate(cores):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        write(folder / "topology/core_id", core)
        write(folder / "topology/physical_package_id", 0)
        for name, values in facts.items():
            write(folder / name.replace("__", "/"), values[cpu])
    return range(len(cores))


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    assert num_cores(tmp_path, machine(tmp_path, [0, 1, 2, 3, 0, 1, 2, 3])) == 4


def test_a_machine_that_says_nothing_has_as_many_cores_as_cpus(tmp_path: Path) -> None:
    assert num_cores(tmp_path, range(6)) == 6


@pytest.mark.parametrize("has_clock", [True, False])
def test_efficiency_cores_of_intel_are_left_out(tmp_path: Path, has_clock: bool) -> None:
    """Six fast cores of two threads, two of them favoured, and eight slow ones."""
    cores = [cpu // 2 * 4 for cpu in range(12)] + list(range(24, 32))
    clock = [5_000_000] * 4 + [4_700_000] * 8 + [3_600_000] * 8
    cpus = machine(tmp_path, cores, **({"cpufreq__cpuinfo_max_freq": clock} if has_clock else {}))
    write(tmp_path / "sys/devices/cpu_core/cpus", "0-11")
    write(tmp_path / "sys/devices/cpu_atom/cpus", "12-19")
    assert num_cores(tmp_path, cpus) == 6
    assert num_cores(tmp_path, cpus[12:]) == 8  # where a process may use no other
    assert num_cores(tmp_path, [0, 1, 2, *cpus[12:]]) == 2


def test_little_cores_of_arm_are_left_out_and_middle_ones_compute(tmp_path: Path) -> None:
    capacities = [446] * 4 + [870] * 3 + [1024]
    assert num_cores(tmp_path, machine(tmp_path, range(8), cpu_capacity=capacities)) == 4


def test_cores_of_one_kind_with_clocks_of_their_own_all_compute(tmp_path: Path) -> None:
    clocks = [5_100_000, 5_000_000, 4_850_000, 4_650_000]
    assert num_cores(tmp_path, machine(tmp_path, range(4), cpufreq__cpuinfo_max_freq=clocks)) == 4


def test_one_memory_node_computes(tmp_path: Path) -> None:
    """Two nodes of eight cores and their second threads, numbered after all first ones."""
    cpus = machine(tmp_path, [*range(16), *range(16)])
    write(tmp_path / "sys/devices/system/node/node0/cpulist", "0-7,16-23")
    write(tmp_path / "sys/devices/system/node/node1/cpulist", "8-15,24-31")
    assert num_cores(tmp_path, cpus) == 8
    assert num_cores(tmp_path, [0, 1, 2, *range(8, 16)]) == 8
    assert num_cores(tmp_path, [0, 16, 8]) == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "1600000 100000"}, 8),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            3,
        ),
        ({"proc/self/cgroup": "0::/of/the/host", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n2:memory:/docker/1\n0::/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": 350_000,
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100_000,
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/a",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": 100_000,
            },
            8,
        ),
        ({"proc/self/cgroup": "no list\n0:", "sys/fs/cgroup/cpu.max": ""}, 8),
    ],
)
def test_a_container_s_share_bounds_them(tmp_path: Path, files: dict[str, object], expected: int) -> None:
    cpus = machine(tmp_path, range(8))
    for name, text in files.items():
        write(tmp_path / name, text)
    assert num_cores(tmp_path, cpus) == expected


def test_who_names_a_number_of_threads_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # torch has read it, or not
    assert default_num_threads() == torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= default_num_threads() <= torch.get_num_threads()
