"""Pages of host memory for what is large: kept when freed, huge where the system has such.

The CPU's device calls `keep_freed_memory` once weights are loaded. What is large and read in streams is taken from
`huge_pages`, or where a start is only planned from `zero_pages`. It knows tensors and the C library, and nothing of
models or caches.
"""

import contextlib
import ctypes
import math
import mmap

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_OLD_REUSED_BYTES = 32 << 20  # the largest threshold that older glibc take
_KEPT_BYTES = 1 << 30
HUGE_PAGE = 2 << 20
_MAP_NORESERVE = 0x4000  # of Linux; the module has no name for it


def keep_freed_memory() -> bool:
    """Let malloc reuse what a step's tensors leave behind; returns whether this C library can (glibc).

    By default glibc maps every large tensor anew and returns it to the system when it is freed, so that each step pays
    for the first touch of its pages again: 2.4 ms for each MiB on the reference machine. Not for loading, which leaves
    large tensors behind that nobody needs again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: False)
    reuses = mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, _OLD_REUSED_BYTES)
    return bool(reuses and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to be read alone: all of it is one page of zeros, so that it may be larger than memory."""
    region = mmap.mmap(-1, dtype.itemsize * math.prod(shape), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        region.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8).view(dtype).view(shape)


def huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor in huge pages, where the system has any: streams through it run faster. Untouched until used."""
    num_bytes = dtype.itemsize * math.prod(shape)
    if num_bytes < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    # Python's default is shared memory, which has huge pages only where an administrator says so.
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes].view(dtype).view(shape)
