"""Ctrl-C at the right time: held back while the engine's books are open, let through while a worker computes.

The engine core and `LLMEngine` wrap their steps in it. Only Python's main thread gets signals; elsewhere it does
nothing. It knows signals, and nothing of engines.
"""

# What `signal` wraps: its search for an enumeration of each handler costs 7 us a step.
import _signal  # pyright: ignore[reportMissingImports]
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_SIGINT = int(signal.SIGINT)


class InterruptShield:
    """A context manager that keeps SIGINT's handler from running until the outermost `with` is left.

    Attributes:
        pending: whether an interrupt came and is held back.
    """

    def __init__(self) -> None:
        self.pending = self._lifted = False
        self._depth = 0
        # What was there before; None: nothing is shielded.
        self._handler: Callable[[int, FrameType | None], object] | None = None

    def __enter__(self) -> "InterruptShield":
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_SIGINT)
            if callable(handler):  # not where interrupts are ignored, or not Python's to handle
                self._handler = handler
                _signal.signal(_SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, self._handler = self._handler, None
        pending, self.pending = self.pending, False
        _signal.signal(_SIGINT, handler)
        if pending:
            handler(signal.SIGINT, None)

    def let_through(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that an interrupt may end at once; the shield is up again by the time that arrives here."""
        self._lifted = True
        try:
            if self.pending:
                self._on_interrupt(signal.SIGINT, None)
            return function(*args)
        finally:
            self._lifted = False

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._lifted and self._handler is not None:
            self._lifted = self.pending = False
            self._handler(number, frame)
        else:
            self.pending = True
