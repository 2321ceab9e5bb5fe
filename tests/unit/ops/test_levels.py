"""The levels of kernels against each other, by a program in C++: on this CPU, and on emulated ones of both kinds."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.native.library import TORCH, levels, library_path

ROOT = Path(__file__).parents[3]
ARM = "aarch64-linux-gnu"
EMULATOR = "qemu-aarch64"
TOOLS = str(Path(sys.executable).parent)  # where set-up puts cmake and ninja that the machine lacks


def found(*names: str) -> list[str]:
    """The paths of programs; without one of them the test is skipped."""
    paths = [shutil.which(name) or shutil.which(name, path=TOOLS) for name in names]
    if missing := [name for name, path in zip(names, paths, strict=True) if path is None]:
        pytest.skip(f"needs {', '.join(missing)} (Debian: g++-aarch64-linux-gnu, qemu-user, cmake, ninja-build)")
    return [path for path in paths if path]


def run(*command: str | Path, timeout: float = 600) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert not done.returncode, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def driver(compiler: str, directory: Path) -> Path:
    """The program, in `directory`; anew, as it is not worth more."""
    program = directory / "levels"
    flags = ["-std=c++17", "-O1", "-DQUIRE_NS=driver", "-I", "csrc", "-pthread"]
    run(compiler, *flags, "tests/native/levels.cpp", "csrc/thread_pool.cpp", "csrc/caches.cpp", "-o", program, "-ldl")
    return program


def compared(output: str) -> list[str]:
    """The levels that were."""
    return [line.split()[1].rstrip(":") for line in output.splitlines() if line.startswith("level ")]


@pytest.mark.slow
def test_levels_of_this_machine(tmp_path: Path) -> None:
    names = [name for name in levels() if name != TORCH]
    if not names:
        pytest.skip("no compiled kernels")
    (compiler,) = found("c++")
    assert compared(run(driver(compiler, tmp_path), library_path())) == names


@pytest.mark.nightly  # it takes minutes to build, once; `make test-levels` runs all tests of these levels
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="emulated by vectors of AVX2")
def test_emulated_levels(tmp_path: Path) -> None:
    make, cmake, _, compiler = found("make", "cmake", "ninja", "c++")
    directory = ROOT / "build/emulated"
    run(make, f"PYTHON={sys.executable}", "build/emulated/build.ninja")
    run(cmake, "--build", directory, timeout=3600)
    names = compared(run(driver(compiler, tmp_path), directory / "_kernels.so"))
    assert names == ["amx", "avx512_bf16", "avx512_vnni", "avx2", "portable"]


@pytest.fixture(scope="module")
def arm() -> list[str | Path]:
    """What compares the levels of Arm, but for the emulator and the CPU: build/arm is kept for the next time."""
    cmake, _, compiler, _ = found("cmake", "ninja", f"{ARM}-g++", EMULATOR)
    directory = ROOT / "build/arm"
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}"]
    run(cmake, "-S", ".", "-B", directory, "-G", "Ninja", "-DQUIRE_OPTIMIZE=-O1", *target)
    run(cmake, "--build", directory)
    return [driver(compiler, directory), directory / "_kernels.so"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "names"),
    [
        ("max", ["neon_bf16", "neon_dot", "portable"]),
        ("neoverse-n1", ["neon_dot", "portable"]),
        ("cortex-a72", ["portable"]),
    ],
)
def test_levels_of_arm(arm: list[str | Path], cpu: str, names: list[str]) -> None:
    (emulator,) = found(EMULATOR)
    assert compared(run(emulator, "-cpu", cpu, "-L", f"/usr/{ARM}", *arm)) == names
