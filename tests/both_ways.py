"""What kernels give that a level computes in two ways: a variable, which is read once a process, tells which."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.native.library import levels


def told_both_ways(script: str, folder: Path, variable: str = "QUIRE_FLOATS", level: str = "avx512_bf16") -> list[str]:
    """The lines that a script prints, which finds modules in `folder`: the same ones either way."""
    if level not in levels():
        pytest.skip(f"this CPU has no {level}")
    told: list[str] = []
    for way in "01":
        given = [sys.executable, "-c", script, str(folder)]
        told_so = os.environ | {variable: way, "QUIRE_KERNELS": level}
        done = subprocess.run(given, env=told_so, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert told[0] == told[1]
    return told[0].splitlines()
