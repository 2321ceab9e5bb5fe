"""How the public names come in."""

import subprocess
import sys
from pathlib import Path

import pytest

_LOOKED_AT = """
import gc
seen = []
gc.callbacks.append(lambda phase, info: seen.append(info) if phase == "start" else None)
if {disabled}:
    gc.disable()
import quire
before = len(seen)
quire.LLM
assert len(seen) == before, seen[before:]
assert gc.isenabled() is (not {disabled})
assert gc.get_freeze_count() == 0
assert gc.get_count()[0] < gc.get_threshold()[0] or {disabled}, gc.get_count()  # nothing is due either
"""


@pytest.mark.slow
@pytest.mark.parametrize("disabled", [False, True])
def test_the_collector_looks_at_nothing_that_an_import_makes(disabled: bool) -> None:
    subprocess.run([sys.executable, "-c", _LOOKED_AT.format(disabled=disabled)], check=True)


def test_an_import_alone_takes_in_little() -> None:
    """`importlib.abc` brings `tempfile`, `random` and more: two thirds of the time of `import quire`."""
    command = [sys.executable, "-S", "-c", "import sys, quire; print(*sys.modules)"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert {"quire", "quire.errors"} <= set(done.stdout.split())
    assert not {"importlib.abc", "tempfile", "dataclasses", "torch"} & set(done.stdout.split())
