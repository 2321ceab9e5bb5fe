"""Available memory on hand-made /proc and control-group files of both versions."""

import os
from pathlib import Path

import pytest

from quire.utils.host_memory import available_memory_bytes

MIB = 2**20


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with 1000 MiB available and an empty control-group mount."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable: 1024000 kB\nBuffers: 5 kB\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def available(host: Path) -> int:
    return available_memory_bytes(host / "proc", host / "cgroup")


def join(host: Path, membership: str) -> None:
    (host / "proc" / "self" / "cgroup").write_text(membership)


def group(directory: Path, **files: int | str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_host_alone(host: Path) -> None:
    assert available(host) == 1000 * MIB
    join(host, "0::/\n")
    assert available(host) == 1000 * MIB


def test_version_2_limit_less_usage(host: Path) -> None:
    join(host, "0::/app\n")
    stat = f"anon 5\ninactive_file {40 * MIB}\n"
    group(host / "cgroup" / "app", memory__max=500 * MIB, memory__current=300 * MIB, memory__stat=stat)
    assert available(host) == 240 * MIB


def test_version_2_parent_is_tighter(host: Path) -> None:
    join(host, "0::/pod/app\n")
    group(host / "cgroup" / "pod" / "app", memory__max="max", memory__current=10 * MIB)
    group(host / "cgroup" / "pod", memory__max=100 * MIB, memory__current=30 * MIB)
    assert available(host) == 70 * MIB


def test_version_2_group_of_a_container(host: Path) -> None:
    join(host, "0::/../../kubepods/pod1\n")  # the host's path; the mount shows the container's own group as its root
    group(host / "cgroup", memory__max=64 * MIB, memory__current=MIB)
    assert available(host) == 63 * MIB


def test_version_1(host: Path) -> None:
    join(host, "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n")
    root = host / "cgroup" / "memory"
    group(root, memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=5 * MIB)
    assert available(host) == 1000 * MIB
    group(
        root / "box",
        memory__limit_in_bytes=200 * MIB,
        memory__usage_in_bytes=150 * MIB,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {20 * MIB}\n",
    )
    assert available(host) == 70 * MIB


def test_usage_over_the_limit_is_zero(host: Path) -> None:
    join(host, "0::/\n")
    group(host / "cgroup", memory__max=MIB, memory__current=2 * MIB)
    assert available(host) == 0


@pytest.mark.parametrize("text", ["", "MemAvailable:\n", "MemAvailable: much kB\n"])
def test_without_meminfo_the_system_is_asked(host: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "proc" / "meminfo").write_text(text)
    pages = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 1000, "SC_PHYS_PAGES": 5000}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert available(host) == 4096 * 1000

    def without_free_pages(name: str) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return pages[name]

    monkeypatch.setattr(os, "sysconf", without_free_pages)
    assert available(host) == 4096 * 2500


def test_this_machine() -> None:
    assert 0 < available_memory_bytes() < 2**50
