"""Whether the engine behind a client lives: joins the event loop, watches for silence, and tells once when it is over.

`AsyncLLM` has one. It knows the client's signs of life and who is to be told of the end, and nothing of requests.
"""

import asyncio
import math
import time
from collections.abc import Callable

from quire.errors import EngineDeadError, EngineStoppedError, QuireError
from quire.protocol.core import CoreClient, Event
from quire.utils.logs import logger


class Monitor:
    """Watches one engine.

    Attributes:
        dead: why it has ended, once it has.
    """

    def __init__(
        self,
        client: CoreClient,
        step_timeout: float,
        on_event: Callable[[Event], None],
        on_end: Callable[[EngineDeadError], None],
        name: str = "the engine",
    ) -> None:
        """`step_timeout`: seconds in one step, or without a sign of life, that are the end."""
        self.dead: EngineDeadError | None = None
        self._client, self._step_timeout = client, step_timeout
        self._on_event, self._on_end = on_event, on_end
        self._name = name
        self._death: asyncio.Future[EngineDeadError] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise EngineDeadError when the engine is dead."""
        if self.dead is not None:
            raise type(self.dead)(str(self.dead))

    def attach(self) -> "asyncio.Future[EngineDeadError]":
        """Join the running event loop, once; returns what the engine's end will be told by.

        Where the loop that was joined is closed, as `asyncio.run` leaves it, the one that runs takes its place.

        Raises:
            EngineDeadError: the engine is dead.
            QuireError: it has joined another loop, to which its answers go.
        """
        self.check()
        loop = asyncio.get_running_loop()
        if self._death is None or (joined := self._death.get_loop()).is_closed():
            self._death = loop.create_future()
            self._client.attach(self._on_event)
            self._watcher = loop.create_task(self._watch())
        elif joined is not loop:
            raise QuireError(f"{self._name} serves another event loop, which is not closed; use it there.")
        return self._death

    async def wait_dead(self) -> EngineDeadError:
        """Wait for the engine's end, and return its reason."""
        return self.dead if self.dead is not None else await asyncio.shield(self.attach())

    def die(self, reason: str) -> None:
        """The engine is dead by itself; a second reason counts for nothing."""
        if self.dead is None:
            self.end(EngineDeadError(f"{self._name} is dead: {reason}."))
            logger.error("%s", self.dead)

    def stop(self) -> None:
        """The engine is being shut down: its end, unless it was dead before."""
        if self.dead is None:
            self.end(EngineStoppedError("the engine was shut down; the request is not complete."))

    def end(self, error: EngineDeadError) -> None:
        """Tell whoever waits for the end, and whoever comes later."""
        self.dead = error
        self._on_end(error)
        if self._death is not None and not self._death.done() and not self._death.get_loop().is_closed():
            self._death.set_result(error)

    def close(self) -> None:
        """Watch no longer."""
        if self._watcher is not None and not (loop := self._watcher.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._watcher.cancel)  # this may be another thread

    async def _watch(self) -> None:
        """Declare an engine dead that hangs."""
        limit, interval = self._step_timeout, min(1.0, self._step_timeout / 4)
        while self.dead is None:
            start = time.monotonic()
            await asyncio.sleep(interval)
            # Where it was this process that stopped (Ctrl-Z, a frozen container), signs of life are yet to be read.
            if time.monotonic() - start <= 2 * interval and (seconds := self._client.seconds_stuck()) > limit:
                self.die("it gave no sign of life" + (f" for {limit:g} s" if seconds < math.inf else ""))
                await asyncio.to_thread(self._client.close)
