"""The engine core's own loop: take what commands there are, step, report.

Runs in the engine's process or thread until a `Stop` comes; `clients.process` and `clients.thread` give it its two
ends. One request's failure is that request's; only a failed step ends the loop.
"""

import time
from collections.abc import Callable, Iterable

from quire.engine.core import EngineCore
from quire.errors import EngineDeadError, QuireError, RequestFailedError
from quire.protocol.core import Abort, Add, Call, Command, Dead, Event, Fault, Finish, News, Ready, Refused, Reply, Stop
from quire.protocol.step import SequenceOutput
from quire.utils.logs import logger


class CoreLoop:
    """Drives an `EngineCore`.

    Attributes:
        step_start: monotonic time at which the running step began, None between steps; read by other threads.
    """

    def __init__(
        self, core: EngineCore, receive: Callable[[bool], Iterable[Command]], send: Callable[[Event], None]
    ) -> None:
        """`receive` returns the commands that have come; called with True it waits for one, a second at most."""
        self.core = core
        self.step_start: float | None = None
        self._receive, self._send = receive, send
        self._ended: list[SequenceOutput] = []  # last outputs of aborted requests
        self._finished = False  # sequences ended, or somebody called since the last step: the stats may be others
        self._running = True

    def ready(self) -> Ready:
        """The facts that the front end needs, once nothing is left to do that would hold up whoever streams."""
        self.core.scheduler.guidance.prepare()
        kv = self.core.scheduler.kv
        return Ready(self.core.max_model_len, sum(kv.num_blocks), kv.block_size)

    def run(self) -> bool:
        """Serve until stopped; False when the engine died."""
        while self._running:
            idle = not self.core.has_unfinished()
            if idle and self.core.debug:
                self.core.check_integrity()
            for command in self._receive(idle):
                self._carry_out(command)
            try:
                if idle:
                    self.core.check_workers()
                self._step()
            except EngineDeadError as error:
                logger.exception("the engine died")
                self._send(Dead(str(error)))
                return False
        return True

    def _step(self) -> None:
        start = time.monotonic()
        outputs, self._ended = self._ended, []
        finished, self._finished = self._finished, False
        scheduled: list[str] = []
        if self.core.has_unfinished():
            self.step_start = start
            outputs += self.core.step()
            self.step_start = None
            scheduled = self.core.first_scheduled
        elif not (outputs or finished):
            return
        self._send(News(outputs, scheduled, start, time.monotonic(), self.core.stats()))

    def _carry_out(self, command: Command) -> None:
        match command:
            case Add(request):
                try:
                    self.core.add(request)
                except Exception as error:
                    why = "the engine failed to take this request; the server's log says why."
                    self._send(Refused(request.request_id, self._fault(error, request.request_id, why)))
            case Abort(request_ids):
                for request_id in request_ids:
                    self._ended += self.core.abort(request_id)
            case Finish(sequences):
                for request_id, index in sequences:
                    self.core.finish_sequence(request_id, index)
                self._finished = True
            case Call():
                self._send(self._answer(command))
                self._finished = True
            case Stop():
                self._running = False

    def _answer(self, call: Call) -> Reply:
        try:
            return Reply(call.call_id, self.core.call(call.name, *call.arguments))
        except Exception as error:
            return Reply(call.call_id, fault=self._fault(error, call.name, f"{call.name} failed: {error}"))

    def _fault(self, error: Exception, what: str, message: str) -> Fault:
        """An error as it is told; one that nobody raised on purpose is logged, and told by a message."""
        if isinstance(error, QuireError):
            return Fault.of(error)
        logger.error("%s failed", what, exc_info=error)
        return Fault.of(RequestFailedError(message))
