"""One request's outputs on their way from the engine to whoever awaits them.

`AsyncLLM` puts, one reader gets. A reader that is slow never makes a queue: what it has not fetched is merged with what
comes, so that memory is bounded by the request's own output.
"""

import asyncio

from quire.outputs import CompletionOutput, RequestOutput


class OutputStream:
    """Holds at most one output, and an error."""

    __slots__ = ("_error", "_merge", "_output", "_waiter")

    def __init__(self, merge: bool) -> None:
        """`merge`: outputs are deltas, to be joined; otherwise the newest one replaces the one before."""
        self._merge = merge
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Hand over an output."""
        self._output = _joined(self._output, output) if self._merge and self._output else output
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream; what was put before is still fetched first."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """The next output; waits for it. Raises what `fail` was given."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._output = self._output, None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two deltas as one."""
    by_index = {part.index: part for part in first.outputs}
    for part in second.outputs:
        before = by_index.get(part.index)
        by_index[part.index] = part if before is None else _joined_completion(before, part)
    second.outputs = [by_index[index] for index in sorted(by_index)]
    return second


def _joined_completion(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    second.text = first.text + second.text
    second.token_ids = first.token_ids + second.token_ids
    if first.logprobs is not None and second.logprobs is not None:
        second.logprobs = first.logprobs + second.logprobs
    return second
