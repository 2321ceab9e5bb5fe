"""What the system says of a process's pages: which are its own, and which a file's."""

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from quire.ops.native.library import library

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    library() is None or not _ENABLED.exists() or "[never]" in _ENABLED.read_text(), reason="needs kernels, huge pages"
)


def into_small_pages(path: Path) -> None:
    """Have the system read a file anew, a page at a time."""
    file = os.open(path, os.O_RDWR)
    os.fsync(file)
    for advice in (os.POSIX_FADV_DONTNEED, os.POSIX_FADV_RANDOM):
        os.posix_fadvise(file, 0, 0, advice)
    for offset in range(0, os.fstat(file).st_size, mmap.PAGESIZE):
        os.pread(file, 1, offset)
    os.close(file)


def own_bytes(tensor: Tensor) -> int:
    """How much of the mappings that a tensor lies in is the process's own memory, and no file's."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
    found = [each.own for each in _mappings() if each.first < end and start < each.end]
    assert found, "no such mapping"
    return sum(found)


def file_bytes(path: Path) -> int:
    """How much of a file is mapped and in memory."""
    return sum(each.resident - each.own for each in _mappings() if each.name == str(path))


@dataclass
class _Mapping:
    first: int
    end: int
    name: str
    resident: int
    own: int


def _mappings() -> Iterator[_Mapping]:
    for part in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        head, _, about = part.partition("\n")
        first, end = (int(bound, 16) for bound in head.split()[0].split("-"))
        size = {key: 1024 * int(kilobytes) for key, kilobytes in re.findall(r"(\w+): +(\d+) kB", about)}
        yield _Mapping(first, end, "".join(head.split(maxsplit=5)[5:]), size["Rss"], size["Anonymous"])
