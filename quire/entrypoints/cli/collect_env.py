"""`quire collect-env`: what a bug report should say about the installation and the machine, on one page.

Keys are not shown, nor is the user's name in paths. What can't be found out is left out.
"""

import importlib.metadata
import os
import platform
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

import quire
from quire.errors import ConfigError
from quire.utils.memory import available_memory_bytes

_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "asimddp", "sve")
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

    from quire.ops.native.library import choose_level, levels, library

    yield "version", quire.__version__
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "compiled kernels", "none; plain torch is used" if library() is None else "built"
    try:
        chosen = choose_level()
    except ConfigError as error:
        chosen = f"none can be chosen: {error}"
    yield "kernel levels", f"{', '.join(levels())}; in use: {chosen}"
    yield "threads", torch.get_num_threads()
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    driver = "; the driver is there, but this torch can't use it" if Path("/proc/driver/nvidia").exists() else ""
    yield "GPUs", ", ".join(names) or f"none found{driver}"


def _machine() -> Rows:
    yield "system", platform.platform()
    if distribution := _value(Path("/etc/os-release"), "PRETTY_NAME", "="):
        yield "distribution", distribution.strip('"')
    cpuinfo = Path("/proc/cpuinfo")
    yield "processor", _value(cpuinfo, "model name", ":") or platform.processor() or platform.machine()
    flags = set((_value(cpuinfo, "flags", ":") or _value(cpuinfo, "Features", ":") or "").split())
    yield "of its features", ", ".join(flag for flag in _CPU_FLAGS if flag in flags) or "none of note"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores", f"{os.cpu_count()}, of which this process may use {usable}"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{total / 2**30:.1f} GiB, of which {available_memory_bytes() / 2**30:.1f} GiB can be had"


def _packages() -> Rows:
    """Versions of what Quire depends on, as far as it is installed."""
    try:
        requirements = importlib.metadata.requires("quire") or []
    except importlib.metadata.PackageNotFoundError:
        yield "quire", "is not installed as a package"
        requirements = ["torch", "numpy", "tokenizers"]
    for name in dict.fromkeys(re.split(r"[^\w.-]", requirement)[0] for requirement in requirements):
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _value(path: Path, name: str, separator: str) -> str | None:
    """The value of the first line `name separator value` of a file."""
    for line in _lines(path):
        key, found, value = line.partition(separator)
        if found and key.strip() == name:
            return value.strip()
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
