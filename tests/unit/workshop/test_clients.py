"""How clients are run: of one that took too long, or failed, nothing is left running."""

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).parents[2] / "clients" / "run.py"


@pytest.fixture
def run() -> Any:
    spec = importlib.util.spec_from_file_location("clients_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("then", "error"), [("wait", subprocess.TimeoutExpired), ("exit 3", subprocess.CalledProcessError)]
)
def test_nothing_is_left_of_a_client(run: Any, then: str, error: type[Exception]) -> None:
    read, write = os.pipe()
    with os.fdopen(read) as source:
        with os.fdopen(write, "w") as sink, pytest.raises(error):
            run.run_alone(["sh", "-c", f"echo begun; sleep 1000 & {then}"], sink, 0.5)
        assert source.read() == "begun\n", "it ends when nobody has its other end"
