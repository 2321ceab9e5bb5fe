"""Workers in processes of their own on this machine, one for each rank, told everything through shared memory.

`select_executor` hands them to the `RemoteExecutor`. Each order reaches all workers through one pipe, each answers
through its own, and each counts its beats. Must not know what is said.
"""

import contextlib
import dataclasses
import logging
import os
import subprocess
import time
from collections.abc import Callable

from quire.config.worker import WorkerConfig
from quire.distributed.links import shared_bytes
from quire.executor.binding import cpus_of_ranks
from quire.executor.orders import BEAT_SECONDS, Lines, lines_bytes
from quire.utils.child import how_it_ended, is_stopped, start_child
from quire.utils.host_memory import make_memory
from quire.utils.logs import logger

SILENCE_SECONDS = 5.0  # without a beat: a worker that does nothing at all any more


class Processes:
    """Workers of this machine, each in its process.

    Args:
        cpu_bind: on which cores they are, as `EngineArgs.cpu_bind`.
    """

    log = "Its log is on standard error"

    def __init__(self, cpu_bind: str) -> None:
        self._bind = cpu_bind
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, config: WorkerConfig) -> WorkerConfig:
        num_ranks = config.num_ranks
        if num_ranks > (num_cores := len(os.sched_getaffinity(0))):
            logger.warning(f"{num_ranks} ranks on {num_cores} cores: slower; lower tensor_ or pipeline_parallel_size")
        memories = [make_memory(lines_bytes(num_ranks))]
        try:
            if num_ranks > 1:
                memories.append(make_memory(shared_bytes(config)))
                config = dataclasses.replace(config, group=f"/proc/self/fd/{memories[1]}")
            self._lines = Lines.of(memories[0], num_ranks)
            for rank, cpus in enumerate(cpus_of_ranks(self._bind, num_ranks)):
                numbers = (memories[0], rank, num_ranks, len(cpus) or max(1, num_cores // num_ranks))
                arguments = (logging.getLevelName(logger.getEffectiveLevel()), *map(str, numbers))
                self.processes.append(start_child("quire.entrypoints.worker", *arguments, shares=memories))
                with contextlib.suppress(OSError):  # a container may forbid it: the worker runs anywhere then
                    os.sched_setaffinity(self.processes[rank].pid, cpus or os.sched_getaffinity(0))
        finally:
            for memory in memories:
                os.close(memory)
        self._beats, self._silent = [0] * num_ranks, [0] * num_ranks  # silent for so many looks
        return config

    def send(self, number: int, body: bytes, check: Callable[[], object]) -> None:
        self._lines.orders.write(number, body, check)

    def receive(self, rank: int, seconds: float) -> tuple[int, bytearray] | None:
        return self._lines.answers[rank].read(seconds)

    def look(self, ready: bool) -> tuple[int, str] | None:
        for rank, process in enumerate(self.processes):
            last, self._beats[rank] = self._beats[rank], self._lines.beats[rank]
            self._silent[rank] = self._silent[rank] + 1 if self._beats[rank] == last else 0
            if (code := process.poll()) is not None:
                return rank, f"ended unexpectedly ({how_it_ended(code)})"
            # While libraries are loaded there may be no beat for long, unless it was stopped.
            if self._silent[rank] * BEAT_SECONDS >= SILENCE_SECONDS and (ready or is_stopped(process)):
                return rank, f"has given no sign of life for {SILENCE_SECONDS:.0f} s"
        return None

    def told(self, rank: int) -> str:
        return f"process {self.processes[rank].pid}"

    def leave(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]  (`start_child` gives it one)
