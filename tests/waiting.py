"""Waiting for what comes to be so by itself."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], seconds: float = 120, failure: str = "it did not happen in time") -> None:
    """Ask until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{failure} ({seconds:g} s)"
        time.sleep(0.02)
