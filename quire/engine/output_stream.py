"""One request's outputs on their way from the engine to whoever awaits them.

`AsyncLLM` puts, one reader gets. A reader that is slow never makes a queue: what it has not fetched is merged with what
comes, so that memory is bounded by the request's own output.
"""

import asyncio
from collections.abc import Callable

from quire.outputs import RequestOutput


class OutputStream:
    """Holds at most one output, and an error.

    Attributes:
        listener: called in the engine's callback when something has come; it must not raise. `get` sets its own.
    """

    __slots__ = ("_error", "_merge", "_output", "listener")

    def __init__(self, merge: bool) -> None:
        """`merge`: outputs are deltas, to be joined; otherwise the newest one replaces the one before."""
        self._merge = merge
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self.listener: Callable[[], object] = bool

    def put(self, output: RequestOutput) -> None:
        """Hand over an output; who put it calls the listener, once nothing more is to be put at the moment."""
        self._output = _joined(self._output, output) if self._merge and self._output else output

    def fail(self, error: Exception) -> None:
        """End the stream; what was put before is still fetched first."""
        self._error = error
        self.listener()

    def take(self) -> RequestOutput | None:
        """What has come since the last time, if anything. Raises what `fail` was given, when nothing else is left."""
        output, self._output = self._output, None
        if output is None and self._error is not None:
            raise self._error
        return output

    async def get(self) -> RequestOutput:
        """The next output; waits for it. Raises as `take`."""
        while (output := self.take()) is None:
            come = asyncio.Event()
            self.listener = come.set
            await come.wait()
        return output


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two deltas as one."""
    parts = {part.index: part for part in first.outputs}
    for part in second.outputs:
        if (before := parts.get(part.index)) is not None:
            part.text, part.token_ids = before.text + part.text, before.token_ids + part.token_ids
            if before.logprobs is not None and part.logprobs is not None:
                part.logprobs = before.logprobs + part.logprobs
        parts[part.index] = part
    second.outputs = [parts[index] for index in sorted(parts)]
    return second
