"""Which requests may go to the engine: no more queue there than was allowed, and none comes while it is paused.

`AsyncLLM` has one, and asks it before anything is done for a request. It knows numbers and names, and no engine.
"""

import asyncio

from quire.errors import InvalidRequestError, OverloadedError


class Admission:
    """The door of one engine.

    Args:
        limit: requests that may wait while others run; None: any number.

    Attributes:
        queued: those that are not yet part of a step.
        is_paused: whether requests wait in `wait`.
        keeps: whether those in the engine wait, too.
    """

    def __init__(self, limit: int | None) -> None:
        self.queued: set[str] = set()
        self.is_paused = self.keeps = False
        self._limit = limit
        self._looks = asyncio.Event()  # when those that wait are to look again

    def check(self, num_requests: int, seats: int, num_open: int, num_waiting: int) -> None:
        """Check that so many more requests may be queued.

        Args:
            seats: requests that may run at a time.
            num_open: those that are queued or run.
            num_waiting: those for which the engine itself had no place in its last step.

        Raises:
            OverloadedError: not now.
            InvalidRequestError: not even when idle.
        """
        limit, queued = self._limit, len(self.queued)
        if limit is None or queued + num_requests <= limit:
            return
        if num_requests > limit + seats:
            most = f"{limit + seats} requests (max_num_queued_reqs = {limit} and max_num_seqs = {seats})"
            why = f"{num_requests} prompts are too many at once: this engine holds at most {most}; send fewer."
            raise InvalidRequestError(why, "prompt")
        # Where nothing waits in the engine, some of those queued are about to run.
        if queued + num_requests > limit + (0 if num_waiting else max(0, seats - (num_open - queued))):
            raise OverloadedError(f"{queued} requests are queued already, and {limit} may be; try again later.")

    def pause(self, keeps: bool) -> None:
        """Let those that come wait until `resume`."""
        self.is_paused, self.keeps = True, keeps

    def resume(self) -> None:
        """Let them go on."""
        self.is_paused = self.keeps = False
        self.look_again()

    def look_again(self) -> None:
        """Let those that wait see whether they still have to."""
        looks, self._looks = self._looks, asyncio.Event()  # another one, as the loop may be, too
        looks.set()

    async def wait(self, request_id: str, aborted: set[str]) -> None:
        """Return once it is not paused, or a look finds the request aborted."""
        while self.is_paused and request_id not in aborted:
            await self._looks.wait()
