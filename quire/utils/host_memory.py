"""How much memory this process may still take, by the host's word and the control group's; memory that processes share.

Called by the worker to size the KV cache on a CPU, and by who lets processes meet. Linux is measured exactly; elsewhere
the answer is the system's own estimate. Must not know what the memory is for.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_UNLIMITED = 2**60  # control groups v1 write a number near 2**63 for "no limit"


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated without swapping: the least of what the host and each enclosing group have left.

    `proc` and `cgroup` are the mount points (tests give others). Page cache that can be dropped counts as free.
    """
    kibibytes = _entry(proc / "meminfo", "MemAvailable:")
    host = _sysconf_available() if kibibytes is None else kibibytes * 1024
    return max(0, min([host, *_cgroup_headrooms(proc / "self" / "cgroup", cgroup)]))


def _entry(path: Path, name: str) -> int | None:
    """The number behind a name in a file of such lines; None where there is none."""
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1])
    return None


def _sysconf_available() -> int:
    """Free pages where the system tells them, else half of all (macOS)."""
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * page
    except (ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * page // 2


def _cgroup_headrooms(membership: Path, root: Path) -> Iterator[int]:
    """Limit minus usage of each memory group from this process's own up to the root of the mount."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if hierarchy == "0" and not controllers:
            base, names, reclaimable = root, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            names, reclaimable = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
            base = root / "memory"
        else:
            continue
        own = base / group.lstrip("/")
        # In a container the group's path may be the host's, while the mount shows the container's group as its root.
        for directory in [own, *own.parents]:
            if (headroom := _headroom(directory, *names, reclaimable)) is not None:
                yield headroom
            if directory == base:
                break


def _headroom(directory: Path, limit_file: str, usage_file: str, reclaimable_key: str) -> int | None:
    with suppress(OSError, ValueError):
        limit = int((directory / limit_file).read_text())  # "max" is no number: no limit
        usage = int((directory / usage_file).read_text())
        if limit < _UNLIMITED:
            return limit - max(0, usage - (_entry(directory / "memory.stat", reclaimable_key) or 0))
    return None


def make_memory(num_bytes: int) -> int:
    """A descriptor of shared memory, all zeros, that has no name: it is gone with the last process that holds it."""
    descriptor = os.memfd_create("quire")
    os.ftruncate(descriptor, num_bytes)
    return descriptor
