"""The engine's process: what it still does when it is told to leave, and how long it is let."""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.engine.clients import process
from quire.engine.clients.process import ProcessClient
from quire.entrypoints.engine import _let_finish
from quire.errors import ConfigError

# A child whose loop ends when it is told to, and which then writes for so many seconds.
CHILD = """
import json, pathlib, sys, time
birth = json.loads(sys.stdin.readline())
sys.stdin.read()
if LOOP_ENDS:
    pathlib.Path(birth["directory"], "left").touch()
time.sleep(SECONDS)
pathlib.Path(FILE).touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop_ends", "seconds", "limits", "finishes"),
    [
        (True, 1.0, (0.5, 60.0), True),
        (True, 600.0, (0.5, 0.5), False),  # it must not hang
        (False, 600.0, (0.5, 600.0), False),  # still in a step, say
        (False, 0.0, (60.0, 0.0), True),
    ],
)
def test_a_child_that_writes_has_time_for_it(
    loop_ends: bool,
    seconds: float,
    limits: tuple[float, float],
    finishes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = f"LOOP_ENDS, SECONDS, FILE = {loop_ends}, {seconds}, {str(tmp_path / 'weights')!r}\n{CHILD}"

    def start_child(module: str) -> Any:
        return subprocess.Popen([sys.executable, "-S", "-c", script], stdin=subprocess.PIPE)

    monkeypatch.setattr(process, "start_child", start_child)
    monkeypatch.setattr(process, "CLOSE_SECONDS", limits[0])
    monkeypatch.setattr(process, "WRITING_SECONDS", limits[1])
    client = ProcessClient(EngineArgs(), "info")
    client._ready = True
    if loop_ends:  # as soon as it is told to: `close` looks for that only when its patience is over
        monkeypatch.setattr(client, "_ends_within", _patient(client._ends_within, Path(client._directory, "left")))
    client.close()
    assert client._process.returncode == (0 if finishes else -9)
    assert (tmp_path / "weights").exists() == finishes
    assert not Path(client._directory).exists()


def _patient(ends_within: Any, sign: Path) -> Any:
    """The same, once a busy machine has let the child come so far."""

    def wait(seconds: float) -> bool:
        while not sign.exists():
            time.sleep(0.01)
        return ends_within(seconds)

    return wait


def test_a_thread_that_writes_is_waited_for_but_not_for_ever() -> None:
    go, done = threading.Event(), threading.Event()

    def write() -> None:
        go.wait()
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    _let_finish(0.01)
    assert not done.is_set()
    go.set()
    _let_finish(30)
    assert done.is_set()


@pytest.mark.parametrize(("name", "why"), [("x" * 100, "File name too long"), ("gone", "No such file or directory")])
def test_sockets_that_can_not_be_made(name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a socket has 107 characters at most; and a container's disk may be closed."""
    if name != "gone":
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / name))
    children: list[Any] = []

    def start_child(module: str) -> Any:
        children.append(subprocess.Popen([sys.executable, "-S", "-c", "input(), input()"], stdin=subprocess.PIPE))
        return children[0]

    monkeypatch.setattr(process, "start_child", start_child)
    with pytest.raises(ConfigError, match=f"sockets for the engine can be made: {why}; set TMPDIR to one of a short"):
        ProcessClient(EngineArgs(), "info")
    assert children[0].wait(10) == -9
    gc.collect()
    assert [*tmp_path.glob("x*/*")] == []
