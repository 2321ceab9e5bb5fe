"""The engine core in a thread of this process: no second process, and one interpreter's lock between the two.

`AsyncLLM` uses it with `engine="thread"`, and has then what can't cross a process border: logits processors written in
Python, `apply_model`.
"""

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable

from quire.config.engine_args import EngineConfig
from quire.protocol.core import Command, Dead, Event, Ready, Stop
from quire.utils.logs import logger

CLOSE_SECONDS = 2.5


class ThreadClient:
    """Builds the core in the calling thread, and runs it in another (a `CoreClient`).

    Raises:
        ConfigError, NotYetSupportedError, ModelLoadError: options or files.
    """

    def __init__(self, config: EngineConfig) -> None:
        # torch comes in with these: a front end whose engine is elsewhere does without.
        from quire.engine.build import build_core
        from quire.engine.loop import CoreLoop

        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._deliver: Callable[[Event], None] = lambda event: None
        self.core = build_core(config, show_progress=False)
        self._loop = CoreLoop(self.core, self._receive, lambda event: self._deliver(event))
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    def wait_ready(self) -> Ready:
        return self._loop.ready()

    def attach(self, on_event: Callable[[Event], None]) -> None:
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(on_event, event)

        self._deliver = deliver

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def seconds_stuck(self) -> float:
        # Of an end that came while no event loop ran nobody has heard.
        start = self._loop.step_start if self._thread.is_alive() else -math.inf
        return 0.0 if start is None else time.monotonic() - start

    def close(self) -> None:
        self.send(Stop())
        self._thread.join(CLOSE_SECONDS)
        self.core.stop()

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception as error:  # a bug of ours; without this nobody would hear of it
            logger.exception("the engine's thread died")
            self._deliver(Dead(f"the engine's thread died ({type(error).__name__})"))

    def _receive(self, wait: bool) -> list[Command]:
        received: list[Command] = []
        with contextlib.suppress(queue.Empty):
            received += [self._commands.get(timeout=1.0)] if wait else []
        while not self._commands.empty():
            received.append(self._commands.get())
        return received
