"""One request's outputs on their way from the engine to whoever awaits them.

`AsyncLLM` says that something has come, one reader takes it. A reader that is slow never makes a queue: an output is
made when it is taken, of all that has come by then.
"""

import asyncio
from collections.abc import Callable

from quire.engine.output_processor import RequestRecord
from quire.outputs import RequestOutput


class OutputStream:
    """Gives what has come of a request, and then its error.

    Attributes:
        source: of outputs, once the engine has the request.
        is_fresh: whether an output is there to be taken.
        listener: called in the engine's callback when something has come, and by `take` when it leaves an error behind;
            it must not raise. `get` sets its own.
    """

    __slots__ = ("_error", "is_fresh", "listener", "source")
    source: RequestRecord

    def __init__(self) -> None:
        self._error: Exception | None = None
        self.is_fresh = False
        self.listener: Callable[[], object] = bool

    def fail(self, error: Exception) -> None:
        """End the stream; what is fresh is still fetched first."""
        self._error = error
        self.listener()

    def take(self) -> RequestOutput | None:
        """What has come since the last time, if anything. Raises what `fail` was given, when nothing else is left."""
        if self.is_fresh:
            self.is_fresh = False
            output = self.source.output()
            if self._error is not None:  # how it ends is for the error to say
                output.finished = False
                for part in output.outputs:
                    if part.finish_reason == "error":
                        part.finish_reason = part.stop_reason = None
                self.listener()  # the error is still to be taken
            return output
        if self._error is not None:
            raise self._error
        return None

    def text(self) -> str | None:
        """The text that has come, where it is all there is to say; else it is for `take` to give."""
        text = self.source.text() if self.is_fresh else None
        self.is_fresh &= text is None
        return text

    async def get(self) -> RequestOutput:
        """The next output; waits for it. Raises as `take`."""
        while (output := self.take()) is None:
            come = asyncio.Event()
            self.listener = come.set
            await come.wait()
        return output
