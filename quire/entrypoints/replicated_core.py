"""Several engines in the place of an `EngineCore`: what it is told goes to a `ReplicasClient`, and news are steps.

`LLM` has `LLMEngine` start it where data_parallel_size > 1. The client lives on an event loop in a thread of its own,
so that engines are watched, and started again, whatever the caller does. It knows nothing of routing or processes.
"""

import asyncio
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from quire.config.engine_args import EngineArgs, EngineConfig
from quire.engine.async_options import AsyncOptions
from quire.engine.interrupts import InterruptShield
from quire.entrypoints.server.replicas import ReplicasClient
from quire.errors import EngineDeadError, InvalidRequestError, OverloadedError
from quire.protocol.core import Abort, Add, Call, CallName, Command, Dead, Event, Finish, News, Refused, Reply
from quire.protocol.requests import NewRequest
from quire.protocol.stats import EngineStats
from quire.protocol.step import Failure, FailureKind, SequenceOutput

_Started = Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]  # has the loop, and what ends it


class ReplicatedCore:
    """Starts the engines (a `Core`); see `EngineCore` for its methods.

    A request that no engine takes, or that was lost with one, is told of in a step, by outputs with the reason. Outputs
    of an aborted one come with later steps.

    Raises:
        ConfigError, NotYetSupportedError, ModelLoadError, EngineDeadError: what an engine was met with.
    """

    def __init__(self, args: EngineArgs, config: EngineConfig) -> None:
        self.clock, self.interrupts = time.monotonic, InterruptShield()
        self.first_scheduled: list[str] = []
        self._ids = itertools.count()
        self._left: dict[str, set[int]] = {}  # of each request the sequences that go on
        self._outputs, self._scheduled = list[SequenceOutput](), list[str]()  # for the next step
        self._replies: dict[int, Reply] = {}
        self._dead: str | None = None
        self._sleeps = False
        self._events = events = deque[Event]()
        self._come = come = threading.Event()  # there are events

        def tell(event: Event) -> None:  # holds nothing of the core, which may be dropped
            events.append(event)
            come.set()

        self._client = client = ReplicasClient(args, config, AsyncOptions())
        try:
            self.max_model_len = client.wait_ready().max_model_len
        except BaseException:
            client.close()
            raise
        started: _Started = Future()
        serving = _serve(client, tell, started)
        thread = threading.Thread(target=asyncio.run, args=(serving,), name="quire-engines", daemon=True)
        thread.start()
        self._loop, ending = started.result()
        self._end = weakref.finalize(self, _end, self._loop, ending, thread, client)

    def add(self, request: NewRequest) -> None:
        self._check_alive()
        if self._sleeps:
            raise OverloadedError("the engines sleep; wake them up first.")
        self._left[request.request_id] = set(range(request.task.num_sequences))
        self._send(Add(request))

    def abort(self, request_id: str) -> list[SequenceOutput]:
        self._send(Abort([request_id]))
        return []

    def finish_sequence(self, request_id: str, sequence_index: int) -> None:
        self._send(Finish([(request_id, sequence_index)]))
        self._drop(request_id, sequence_index)

    def has_unfinished(self) -> bool:
        return bool(self._left or self._outputs)

    def step(self) -> list[SequenceOutput]:
        """Wait for news of any engine."""
        self._check_alive()
        with self.interrupts:
            if not self._outputs:
                self._take()
        self.first_scheduled, self._scheduled = self._scheduled, []
        outputs, self._outputs = self._outputs, []
        return outputs

    def settle(self) -> None: ...  # engines do by themselves

    def stats(self) -> EngineStats:
        """All engines' counters and gauges at this moment, summed up."""
        return self.call("snapshot").stats

    def stop(self) -> None:
        self._end()

    def _check_alive(self) -> None:
        if self._dead is not None or not self._end.alive:
            raise EngineDeadError(self._dead or "the engines were stopped.")

    def _send(self, command: Command) -> None:
        if self._end.alive:
            self._loop.call_soon_threadsafe(self._client.send, command)

    def call(self, name: CallName, *arguments: Any) -> Any:
        self._check_alive()
        call_id = next(self._ids)
        self._send(Call(call_id, name, list(arguments)))
        while (reply := self._replies.pop(call_id, None)) is None:
            self._check_alive()
            self._take()
        if name in ("sleep", "wake_up"):  # whatever became of it: one engine may have done it
            self._sleeps = self.call("is_sleeping")
        if reply.fault is not None:
            raise reply.fault.error()
        return reply.value

    def _take(self) -> None:
        """Wait for events, which an interrupt may end, and sort them."""
        with self.interrupts:
            self.interrupts.let_through(self._come.wait)
            self._come.clear()
            while self._events:
                match self._events.popleft():
                    case News(outputs, scheduled):
                        self._outputs += outputs
                        self._scheduled += scheduled
                        for item in outputs:
                            if item.finish_reason is not None:
                                self._drop(item.request_id, item.sequence_index)
                    case Reply() as reply:
                        self._replies[reply.call_id] = reply
                    case Refused() as refused:
                        self._refuse(refused)
                    case Dead(message):
                        self._dead = f"all engines are dead: {message}"
                        raise EngineDeadError(self._dead)

    def _refuse(self, event: Refused) -> None:
        left, error = self._left.pop(event.request_id, ()), event.fault.error()
        wrong = isinstance(error, InvalidRequestError)
        kind = FailureKind.BAD_REQUEST if wrong else FailureKind.INTERNAL
        failure = Failure(kind, str(error), (error.param if wrong else None) or "prompts")
        self._outputs += [SequenceOutput(event.request_id, i, [], finish_reason="error", failure=failure) for i in left]

    def _drop(self, request_id: str, index: int) -> None:
        """A sequence has ended, and perhaps its request."""
        if (left := self._left.get(request_id)) is not None:
            left.discard(index)
            if not left:
                del self._left[request_id]


async def _serve(client: ReplicasClient, tell: Callable[[Event], None], started: _Started) -> None:
    """In a thread: hand events over until the end."""
    ending = asyncio.Event()
    client.attach(tell)
    started.set_result((asyncio.get_running_loop(), ending))
    await ending.wait()


def _end(loop: asyncio.AbstractEventLoop, end: asyncio.Event, thread: threading.Thread, client: ReplicasClient) -> None:
    loop.call_soon_threadsafe(end.set)
    if thread is not threading.current_thread():  # in which garbage may be collected too
        thread.join()  # sockets belong to one thread at a time
    client.close()
