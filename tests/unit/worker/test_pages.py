"""Pages that are kept when they are freed, and large ones."""

import platform
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from driving import VOCAB, Driver

from quire.ops.native.library import levels
from quire.worker.pages import huge_pages, keep_freed_memory


def test_freed_memory_is_kept_where_the_c_library_can() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's list of mappings")
def test_what_is_large_is_no_shared_memory_and_asks_for_huge_pages() -> None:
    """Shared memory has huge pages only where an administrator says so, and its faults wait for each other."""
    tensor = huge_pages((5, 1 << 20), torch.uint8)
    assert not tensor.any()
    address, flags, is_here = tensor.data_ptr(), "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if not first.endswith(":"):  # a mapping's first line: addresses, permissions, offset, device, inode, file
            start, end = (int(bound, 16) for bound in first.split("-"))
            is_here = start <= address < end
            if is_here:
                assert others[0].endswith("p"), line
                assert others[3] == "0", line
        elif first == "VmFlags:" and is_here:
            flags = line
    supported = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert not supported or "hg" in flags.split(), flags


def _is_new_enough() -> bool:
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(map(int, version.split("."))) >= (2, 35) and len(levels()) > 1


@pytest.mark.skipif(not _is_new_enough(), reason="older ones map 32 MiB and more anew")
def test_logits_of_many_rows_touch_no_new_pages_in_later_steps(drive: Callable[..., Driver]) -> None:
    model = drive().executor.worker.runner.model
    hidden = torch.zeros(-(-(40 << 20) // (4 * VOCAB)), 32)
    faults: list[int] = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model.compute_logits(hidden)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert max(faults[1:]) < 1000, "40 MiB are 10,240 pages"
