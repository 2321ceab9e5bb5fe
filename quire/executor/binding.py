"""Which cores each worker of a machine gets: an even share of whole cores, neighbours together, or as the user says.

The processes executor asks, and so does each of several engines. Memory
follows the cores: the kernel gives a process that of the node it runs on.
"""

import os
import re
from pathlib import Path

from quire.errors import ConfigError


def cpus_of_ranks(bind: str, num_ranks: int, system: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """The kernel's numbers of the CPUs that each rank is bound to; [] for none.

    Args:
        bind: "auto", "none", or a list by rank, as "0-1|2-3".

    Raises:
        ConfigError: the list is none, is of another length, or names CPUs that this process may not use.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    if bind not in ("auto", "none"):
        given = [_listed(part) for part in bind.split("|")]
        if len(given) == num_ranks and all(cpus and allowed.issuperset(cpus) for cpus in given):
            return given
        raise ConfigError(
            f"cpu_bind={bind!r} must be 'auto', 'none' or a list of CPUs for each of {num_ranks} ranks, as '0-1|2-3', "
            f"out of those that this process may use: {', '.join(map(str, sorted(allowed)))}."
        )
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(allowed):
        cores.setdefault(_place(system / f"cpu{cpu}", cpu), []).append(cpu)
    shared = [cpus for _, cpus in sorted(cores.items())]
    if bind == "none" or num_ranks == 1 or len(shared) < num_ranks:
        return [[]] * num_ranks
    bounds = [len(shared) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [sum(shared[a:b], []) for a, b in zip(bounds, bounds[1:], strict=False)]


def _place(path: Path, cpu: int) -> tuple[int, ...]:
    """Memory node, socket and core of a CPU: those of one core are its threads."""
    node = next((int(found.name[4:]) for found in path.glob("node[0-9]*")), 0)
    files = [path / "topology" / name for name in ("physical_package_id", "core_id")]
    return node, *(int(file.read_text()) if file.exists() else cpu for file in files)


def _listed(text: str) -> list[int]:
    """The numbers of "0-3,8"; none where it is something else."""
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text.strip()):
        return []
    ends = [part.partition("-") for part in text.split(",")]
    return [cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)]
