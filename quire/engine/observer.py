"""What an `AsyncLLM` tells of its requests, for who counts and times them.

The server's metrics are one. Called on the event loop's thread, with request ids of the engine's own; every time is in
seconds of the monotonic clock.
"""

from quire.protocol.requests import NewRequest
from quire.protocol.stats import EngineStats


class Observer:
    """Makes nothing of what it is told."""

    def on_arrival(self, request: NewRequest, n: int) -> None:
        """A request was accepted, of which `n` sequences will be told."""

    def on_scheduled(self, request_id: str, now: float) -> None:
        """A step computed some of a request."""

    def on_tokens(self, request_id: str, sequence_index: int, num_tokens: int, now: float) -> None:
        """A step brought tokens of a sequence; calls with the same `now` are of one step."""

    def on_finished(self, request_id: str, reasons: list[str], num_cached_tokens: int, now: float) -> None:
        """A request ended, each of its sequences for a reason."""

    def on_engine_stats(self, stats: EngineStats, now: float) -> None:
        """The engine's newest figures."""
