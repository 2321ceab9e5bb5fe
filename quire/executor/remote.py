"""The executor of workers elsewhere: orders out, answers and faults back, whatever carries them.

`select_executor` makes it of workers in processes (`quire.executor.processes`) or in Ray's actors. All ranks are told
of all plans; results come from the one that `WorkerConfig.reporter` says. A thread watches the workers: when one ends,
or beats no more, all are ended, and whoever waits, or comes later, gets one error: which rank, and what happened. Must
not know what is computed.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from quire import errors
from quire.config.worker import WorkerConfig
from quire.errors import EngineDeadError
from quire.executor.base import Executor
from quire.executor.orders import BEAT_SECONDS, FAULT, NUMBERS, ORDERS, decoded, encoded
from quire.protocol.cache import CacheLayout, CacheReport, least
from quire.protocol.step import SampleGuide, StepPlan, StepResult
from quire.protocol.worker import WorkerCall, WorkerReply, WorkerReport

_LOOK_SECONDS = 0.1  # between two looks at what the watch has found
_CAUSE_SECONDS = 6.0  # until an end has been seen that others tell of
_CLOSE_SECONDS = 10.0  # for workers to leave by themselves: blocks and weights are being written


class Workers(Protocol):
    """One worker for each rank, somewhere: how they are started, told, heard and ended.

    Attributes:
        log: where an error says that their log is.
    """

    log: str

    def start(self, config: WorkerConfig) -> WorkerConfig:
        """Start them; returns the configuration with the place where they meet."""
        ...

    def send(self, number: int, body: bytes, check: Callable[[], object]) -> None:
        """Give all ranks an order; while that waits, `check` is called now and then (and may raise)."""

    def receive(self, rank: int, seconds: float) -> tuple[int, bytes | bytearray] | None:
        """A rank's next answer; None where there was none in time."""
        ...

    def look(self, ready: bool) -> tuple[int, str] | None:
        """The first rank that is gone, or gives no sign of life, and what is to be said of it; called twice a second.

        `ready` is False until models are loaded: while libraries are, a worker may be silent for long.
        """
        ...

    def told(self, rank: int) -> str:
        """What is told of a rank besides its number, as its process."""
        ...

    def leave(self, seconds: float) -> None:
        """Wait until all have left, as they were ordered to."""

    def kill(self) -> None:
        """End them now; safe to call twice, and from another thread."""


class RemoteExecutor(Executor):
    """Workers that are not in this process.

    Args:
        config: what they run; each knows its own rank.

    Attributes:
        ended: there are no workers any more.
    """

    def __init__(self, config: WorkerConfig, workers: Workers) -> None:
        self._config, self.workers = config, workers
        self.max_in_flight = config.num_stages
        self._name = "load"  # of the last order
        self._fault = ""  # why nothing can be asked any more
        self.ended = False

    def start(self, progress: bool) -> WorkerReport:
        try:
            self._config = self.workers.start(self._config)
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="quire-watch", daemon=True).start()
            self.report = report = self._ask("load", (self._config, progress))[0]
            return report
        except BaseException:
            self._kill()
            raise

    def cache_report(self) -> CacheReport:
        return least(self._ask("cache_report"))

    def initialize_cache(self, layout: CacheLayout) -> None:
        self._ask("initialize_cache", layout)

    def submit(self, plan: StepPlan) -> None:
        self._order("begin", plan)

    def collect(self, guide: SampleGuide | None = None) -> StepResult:
        [result] = self._ask("finish", guide)
        if self.max_in_flight > 1:  # stages before the last do not sample
            self._order("take", result)
        return result

    def reset(self) -> None:
        self._ask("reset")

    def call(self, call: WorkerCall) -> list[WorkerReply]:
        return self._ask("call", call)

    def check(self) -> None:
        if self._fault:
            while any([self._read(rank, 0.0) for rank in range(self._config.num_ranks)]):
                pass  # rather what a worker said before its end
            raise EngineDeadError(self._fault)

    def stop(self) -> None:
        if not self.ended and self.report is not None:
            self.ended = True
            with contextlib.suppress(EngineDeadError):
                self._order("close")
            self.workers.leave(_CLOSE_SECONDS)
        self._kill()

    def _order(self, name: str, argument: object = None) -> None:
        self._name = name
        self.check()
        self.workers.send(NUMBERS[name], b"" if ORDERS[name].argument is None else encoded(argument), self.check)

    def _ask(self, name: str, argument: object = None) -> list[Any]:
        """The answers of the ranks that give one."""
        self._order(name, argument)
        answers = []
        for rank in range(self._config.num_ranks) if ORDERS[name].answers == "all" else (self._config.reporter,):
            # What is of another order is what somebody waited for before an interrupt.
            while (message := self._read(rank, _LOOK_SECONDS)) is None or message[0] != NUMBERS[name]:
                self.check()
            answers.append(decoded(message[1], ORDERS[name].reply))
        return answers

    def _read(self, rank: int, seconds: float) -> tuple[int, bytes | bytearray] | None:
        if (message := self.workers.receive(rank, seconds)) is not None and message[0] == FAULT:
            self._fail(rank, *decoded(message[1], tuple[str, str]))
        return message

    def _fail(self, rank: int, kind: str, text: str) -> None:
        """End all, and raise what a worker raised: before the first step, the error that a user expects."""
        told, end = self._told(rank, f"failed ({kind}: {text})"), time.monotonic() + _CAUSE_SECONDS
        while (aborted := kind == "GroupAbortedError") and not self._fault and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)  # the watch finds who has really ended
        self._kill()
        self._fault = aborted and self._fault or told
        if kind == "MemoryError" and self._name == "initialize_cache":
            raise MemoryError(text)
        if self._name in ("load", "cache_report", "initialize_cache") and (known := getattr(errors, kind, None)):
            # Of several nodes one may lack the model's files, or the memory.
            raise known(f"{text} ({self.workers.told(rank)})" if self._config.nodes else text)
        raise EngineDeadError(self._fault)

    def _told(self, rank: int, what: str) -> str:
        which = f"the worker of rank {rank} of {self._config.num_ranks} ({self.workers.told(rank)})"
        return f'{which} {what}; last it was {ORDERS[self._name].doing}. {self.workers.log}, after "(rank {rank})"'

    def look(self) -> None:
        """Look whether all workers run, and beat; where not, end them."""
        if (found := self.workers.look(self.report is not None)) is not None and not self.ended:
            self._fault = self._told(*found)
            self._kill()

    def _kill(self) -> None:
        self.ended = True
        self.workers.kill()


def _watch(executor: "weakref.ref[RemoteExecutor]") -> None:
    """Look now and then; an executor that nobody holds any more is not kept for that, and its workers end with it."""
    while (watched := executor()) is not None and not watched.ended:
        watched.look()
        del watched
        time.sleep(BEAT_SECONDS)
