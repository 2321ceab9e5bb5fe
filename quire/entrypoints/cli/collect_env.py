"""`quire collect-env`: what a bug report should say about the installation and the machine, on one page.

Keys are not shown, nor is the user's name in paths. What can't be found out is left out.
"""

import os
import platform
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import quire
from quire.errors import ConfigError
from quire.utils.host_memory import available_memory_bytes

_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "bf16", "i8mm", "sve")
_VARIABLES = re.compile(
    r"(QUIRE|OMP|KMP|GOMP|MKL|CUDA|NVIDIA|HF|TORCH|PYTORCH|PYTHON)_?\w*|LD_PRELOAD|XDG_CACHE_HOME", re.ASCII
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)

Rows = Iterator[tuple[str, object]]


def add_flags(parser: ArgumentParser) -> None:
    """`quire collect-env` has no flags."""
    parser.epilog = "Meant for bug reports. It shows no keys."


def run(_: Namespace) -> None:
    """Print the page."""
    sections = {
        "Quire": _installation(),
        "Machine": _machine(),
        "Packages": _packages(),
        "Environment variables": environment(os.environ),
    }
    for title, rows in sections.items():
        print(title)
        for name, value in list(rows) or [("none", "")]:
            print(f"  {name:<24}{value}".rstrip())


def environment(variables: Mapping[str, str]) -> Rows:
    """The variables that may matter, without secrets and with `~` for the user's home directory."""
    home = variables.get("HOME") or "\0"
    for name in sorted(filter(_VARIABLES.fullmatch, variables)):
        yield name, "(set; not shown)" if _SECRET.search(name) else variables[name].replace(home, "~")


def _installation() -> Rows:
    import torch

    from quire.ops.native.library import choose_level, default_num_threads, levels, library

    yield "version", quire.__version__
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "compiled kernels", "none; plain torch is used" if library() is None else "built"
    try:
        chosen = choose_level()
    except ConfigError as error:
        chosen = f"none can be chosen: {error}"
    yield "kernel levels", f"{', '.join(levels())}; in use: {chosen}"
    yield "threads", default_num_threads()
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    driver = "; the driver is there, but this torch can't use it" if Path("/proc/driver/nvidia").exists() else ""
    yield "GPUs", ", ".join(names) or f"none found{driver}"


def _machine() -> Rows:
    yield "system", platform.platform()
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    cpu = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    yield "processor", cpu.get("model name") or platform.processor() or platform.machine()
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    yield "of its features", ", ".join(flag for flag in _CPU_FLAGS if flag in flags) or "none of note"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores", f"{os.cpu_count()}, of which this process may use {usable}"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{total / 2**30:.1f} GiB, of which {available_memory_bytes() / 2**30:.1f} GiB can be had"


def _packages() -> Rows:
    """Versions of what Quire depends on, as far as it is installed."""
    from importlib.metadata import PackageNotFoundError, requires, version  # slow to import

    with suppress(PackageNotFoundError):
        for name in dict.fromkeys(re.split(r"[^\w.-]", requirement)[0] for requirement in requires("quire") or ()):
            with suppress(PackageNotFoundError):
                yield name, version(name)
