"""Starts Python processes that Quire runs of itself: the engine's own, workers', and those that render chat templates.

Each is a module run with `python -P -m`, imports the very Quire that started it, is told what to do on its standard
input, and leaves when that ends. What is said there is for the two ends to agree on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_NICENESS = 10
_ROOT = str(Path(__file__).resolve().parents[2])
_HARMLESS = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_HARMLESS_PREFIXES = ("LC_", "PYTHON")


class Child(subprocess.Popen[bytes]):
    """A process that leaves when nobody holds it: `Popen` itself would keep its standard input open."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # it was not started, or has left
            self.stdin.close()  # type: ignore[union-attr]
        super().__del__()


def work_behind_others() -> None:
    """Let this thread, and what it starts, have less of a busy machine than those that stream (Linux only)."""
    if sys.platform == "linux":  # where a thread has a niceness of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def leave_ends_to_parent() -> None:
    """In a child: a terminal's Ctrl-C and a service manager's SIGTERM go to the whole group; the parent decides."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def start_child(
    module: str, *arguments: str, answers: bool = False, keys: bool = True, shares: Sequence[int] = ()
) -> Child:
    """Start a module as a process with a pipe to its standard input, which no Ctrl-C reaches.

    Args:
        answers: read its standard output too; else that is this process's.
        keys: pass on the whole environment, and not only what an interpreter needs to start.
        shares: descriptors that it gets, under the same numbers.

    Raises:
        OSError: the system allows no further process.
    """
    # -P: the working directory is no place to import from.
    command = [sys.executable, "-P", "-m", module, *arguments]
    pipe = subprocess.PIPE
    kept = {k: v for k, v in os.environ.items() if keys or k in _HARMLESS or k.startswith(_HARMLESS_PREFIXES)}
    # This copy of Quire is the first among what it may import.
    environment = kept | {"PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))}
    # A terminal's Ctrl-C goes to the child as well, and would end it with a traceback while it still imports.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return Child(command, stdin=pipe, stdout=pipe if answers else None, env=environment, pass_fds=shares)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def how_it_ended(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    hint = "; out of memory, perhaps: 'quire plan' says what it takes" if name in ("SIGKILL", "SIGABRT") else ""
    return name + hint


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child that has not been seen to end was stopped (SIGSTOP), and not let go on yet."""
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
