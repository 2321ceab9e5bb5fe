"""What kernels of bf16 give by pairs and as floats: QUIRE_FLOATS, which tells how, is read once a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.native.library import choose_level


def told_both_ways(script: str, folder: Path) -> list[str]:
    """The lines that a script prints, which finds modules in `folder`: the same ones either way."""
    if choose_level() != "avx512_bf16":
        pytest.skip("this CPU's level has one way")
    told: list[str] = []
    for floats in "01":
        given = [sys.executable, "-c", script, str(folder)]
        done = subprocess.run(given, env=os.environ | {"QUIRE_FLOATS": floats}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert told[0] == told[1]
    return told[0].splitlines()
