"""How much slower the machine is than one that nobody else uses: what a test's limit of seconds is multiplied with.

A thread computes for some milliseconds of processor time again and again, and notes how long that took on the clock.
"""

import hashlib
import threading
import time


class Slowness:
    """`with Slowness() as slowness: ...; assert seconds < 10 * slowness()`."""

    def __init__(self) -> None:
        self._worst = 1.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __call__(self) -> float:
        """The worst so far: 1 on a quiet machine, n where each of n others gets as much of a core."""
        return self._worst

    def __enter__(self) -> "Slowness":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._ends.wait(0.2):
            start, computed = time.monotonic(), time.thread_time()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000)  # some milliseconds, without the GIL
            self._worst = max(self._worst, (time.monotonic() - start) / (time.thread_time() - computed))
