"""The processes executor: workers in processes of their own on this machine, one for each rank.

The engine's process only plans. Plans go to all workers through shared memory, and every rank carries out all of them;
results come back from rank 0. A thread watches the workers: when one ends, or beats no more, all are ended, and whoever
waits, or comes later, gets one error that says which rank and what happened. Must not know what is computed.
"""

import contextlib
import dataclasses
import logging
import os
import subprocess
import threading
import time
import weakref
from typing import Any

from quire import errors
from quire.config.parallel import ParallelConfig
from quire.config.worker import WorkerConfig
from quire.distributed.groups import segment_bytes
from quire.errors import EngineDeadError
from quire.executor.base import Executor
from quire.executor.binding import cpus_of_ranks
from quire.executor.orders import BEAT_SECONDS, FAULT, NUMBERS, ORDERS, Lines, decoded, encoded, lines_bytes
from quire.executor.transport import make_memory
from quire.protocol.cache import CacheLayout, CacheReport
from quire.protocol.step import SampleGuide, StepPlan, StepResult
from quire.protocol.worker import WorkerCall, WorkerReply, WorkerReport
from quire.utils.child import how_it_ended, start_child

SILENCE_SECONDS = 5.0  # without a beat: a worker that does nothing at all any more
_LOOK_SECONDS = 0.1  # between two looks at what the watch has found
_CLOSE_SECONDS = 10.0  # for workers to leave by themselves: blocks and weights are being written

logger = logging.getLogger("quire")


class ProcessesExecutor(Executor):
    """Workers of this machine, each in its process.

    Args:
        config: what they run; each gets its own rank.
        parallel: how many there are, and on which cores.

    Attributes:
        ended: there are no workers any more.
    """

    def __init__(self, config: WorkerConfig, parallel: ParallelConfig) -> None:
        self._config, self._bind = config, parallel.cpu_bind
        self._processes: list[subprocess.Popen[bytes]] = []
        self._name = "load"  # of the last order
        self._fault = ""  # why nothing can be asked any more
        self.ended = False

    def start(self, progress: bool) -> WorkerReport:
        num_ranks = self._config.num_ranks
        if num_ranks > (num_cores := len(os.sched_getaffinity(0))):
            logger.warning("%d ranks on %d cores: slower; lower tensor_parallel_size", num_ranks, num_cores)
        memories = [make_memory(lines_bytes(num_ranks))]
        if num_ranks > 1:
            memories.append(make_memory(segment_bytes(self._config.model.vocab_size)))
            self._config = dataclasses.replace(self._config, group=f"/proc/self/fd/{memories[1]}")
        try:
            self._lines = Lines.of(memories[0], num_ranks)
            for rank, cpus in enumerate(cpus_of_ranks(self._bind, num_ranks)):
                numbers = (memories[0], rank, num_ranks, len(cpus) or max(1, num_cores // num_ranks))
                arguments = (logging.getLevelName(logger.getEffectiveLevel()), *map(str, numbers))
                self._processes.append(start_child("quire.entrypoints.worker", *arguments, shares=memories))
                with contextlib.suppress(OSError):  # a container may forbid it: the worker runs anywhere then
                    os.sched_setaffinity(self._processes[rank].pid, cpus or os.sched_getaffinity(0))
            for memory in memories:
                os.close(memory)
            self._beats, self._silent = [0] * num_ranks, [0] * num_ranks  # silent for so many looks
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="quire-watch", daemon=True).start()
            self.report = report = self._ask("load", (self._config, progress))[0]
            return report
        except BaseException:
            self._kill()
            raise

    def cache_report(self) -> CacheReport:
        return min(self._ask("cache_report"), key=lambda report: report.available_bytes - report.activation_bytes)

    def initialize_cache(self, layout: CacheLayout) -> None:
        self._ask("initialize_cache", layout)

    def submit(self, plan: StepPlan) -> None:
        self._order("begin", plan)

    def collect(self, guide: SampleGuide | None = None) -> StepResult:
        return self._ask("finish", guide)[0]

    def reset(self) -> None:
        self._ask("reset")

    def call(self, call: WorkerCall) -> list[WorkerReply]:
        return self._ask("call", call)

    def check(self) -> None:
        if self._fault:
            for rank in range(len(self._processes)):  # rather what a worker said before its end
                while self._read(rank, 0.0) is not None:
                    pass
            raise EngineDeadError(self._fault)

    def stop(self) -> None:
        if not self.ended and self.report is not None:
            self.ended = True
            with contextlib.suppress(EngineDeadError):
                self._order("close")
            end = time.monotonic() + _CLOSE_SECONDS
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        self._kill()

    def _order(self, name: str, argument: object = None) -> None:
        self._name = name
        self.check()
        body = b"" if ORDERS[name].argument is None else encoded(argument)
        self._lines.orders.write(NUMBERS[name], body, self.check)

    def _ask(self, name: str, argument: object = None) -> list[Any]:
        """The answers of the ranks that give one."""
        self._order(name, argument)
        answers = []
        for rank in range(len(self._processes) if ORDERS[name].answers == "all" else 1):
            # What is of another order is what somebody waited for before an interrupt.
            while (message := self._read(rank, _LOOK_SECONDS)) is None or message[0] != NUMBERS[name]:
                self.check()
            answers.append(decoded(message[1], ORDERS[name].reply))
        return answers

    def _read(self, rank: int, seconds: float) -> tuple[int, bytearray] | None:
        message = self._lines.answers[rank].read(seconds)
        if message is not None and message[0] == FAULT:
            self._fail(rank, *decoded(message[1], tuple[str, str]))
        return message

    def _fail(self, rank: int, kind: str, text: str) -> None:
        """End all, and raise what a worker raised: before the first step, the error that a user expects."""
        self._kill()
        self._fault = self._told(rank, f"failed ({kind}: {text})")
        known = MemoryError if kind == "MemoryError" else getattr(errors, kind, None)
        if known is not None and self._name in ("load", "cache_report", "initialize_cache"):
            raise known(text)
        raise EngineDeadError(self._fault)

    def _told(self, rank: int, what: str) -> str:
        which = f"the worker of rank {rank} of {len(self._processes)} (process {self._processes[rank].pid})"
        last = f'last it was {ORDERS[self._name].doing}. Its log is on standard error, after "(rank {rank})"'
        return f"{which} {what}; {last}"

    def look(self) -> None:
        """Look whether all workers run, and beat; where not, end them."""
        for rank, process in enumerate(self._processes):
            beat = self._lines.beats[rank]
            self._silent[rank] = self._silent[rank] + 1 if beat == self._beats[rank] else 0
            self._beats[rank], what = beat, ""
            if (code := process.poll()) is not None:
                what = f"ended unexpectedly ({how_it_ended(code)})"
            # While libraries are loaded there may be no beat for long, unless it was stopped.
            elif self._silent[rank] * BEAT_SECONDS >= SILENCE_SECONDS and (
                self.report or os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            ):
                what = f"has given no sign of life for {SILENCE_SECONDS:.0f} s"
            if what and not self.ended:
                self._fault = self._told(rank, what)
                return self._kill()

    def _kill(self) -> None:
        self.ended = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _watch(executor: "weakref.ref[ProcessesExecutor]") -> None:
    """Look now and then; an executor that nobody holds any more is not kept for that, and its workers end with it."""
    while (watched := executor()) is not None and not watched.ended:
        watched.look()
        del watched
        time.sleep(BEAT_SECONDS)
