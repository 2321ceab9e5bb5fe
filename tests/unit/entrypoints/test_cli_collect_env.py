"""`quire collect-env`: what it shows, and what it never shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from quire.entrypoints.cli.collect_env import environment

ROOT = Path(__file__).parents[3]


def test_variables_without_secrets() -> None:
    variables = {
        "HOME": "/home/jo", "QUIRE_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "QUIRE_KERNELS": "avx2",
        "OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": "/home/jo/.cache", "AWS_SECRET_ACCESS_KEY": "s3cret", "USER": "jo",
    }  # fmt: skip
    shown = dict(environment(variables))
    assert shown == {
        "HF_TOKEN": "(set; not shown)", "OMP_NUM_THREADS": "2", "QUIRE_API_KEY": "(set; not shown)",
        "QUIRE_KERNELS": "avx2", "XDG_CACHE_HOME": "~/.cache",
    }  # fmt: skip
    assert dict(environment({"QUIRE_X": "1"})) == {"QUIRE_X": "1"}


@pytest.mark.slow
def test_the_page() -> None:
    """In a process of its own, as it imports torch; with settings that keep an engine from starting."""
    environment = {"PATH": "", "QUIRE_KERNELS": "none-such", "QUIRE_API_KEY": "s3cret"}
    command = [sys.executable, "-m", "quire", "collect-env"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split(maxsplit=1)[0] for line in done.stdout.splitlines()]
    for name in ("version", "Python", "compiled", "threads", "processor", "cores", "memory", "torch", "QUIRE_API_KEY"):
        assert name in lines
    assert "kernels='none-such' can't be used" in done.stdout
    assert "s3cret" not in done.stdout
