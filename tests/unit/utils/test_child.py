"""Processes that Quire starts of itself: what they inherit."""

import os
import select
import signal
import time
from pathlib import Path

import pytest

from quire.utils.child import is_stopped, start_child


def test_no_interrupt_ends_a_child_while_it_imports() -> None:
    """Ctrl-C goes to a terminal's whole group, and a child that has not got to ignoring it would show a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child = start_child("quire.text.render_child", "1", "64", answers=True)
    try:
        lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        [blocked] = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
        assert blocked >> (signal.SIGINT - 1) & 1
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    finally:
        child.kill()
        child.communicate()


def test_a_child_that_was_stopped_is_known_until_it_goes_on() -> None:
    child = start_child("quire.text.render_child", "1", "64", answers=True)
    try:
        for number, stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
            child.send_signal(number)
            end = time.monotonic() + 60
            while is_stopped(child) != stopped and time.monotonic() < end:
                time.sleep(0.01)
            assert is_stopped(child) == stopped
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("told", [b"", b"half a line"])
def test_a_child_leaves_when_nobody_holds_it(told: bytes) -> None:
    child = start_child("quire.text.render_child", "1", "64", answers=True)
    assert child.stdin is not None
    child.stdin.write(told)
    held = os.pidfd_open(child.pid)
    del child
    try:
        assert select.select([held], [], [], 60)[0], "it still runs"
    finally:
        os.close(held)
