"""The in-process executor: one worker, called directly. The engine's default on a single device."""

import zlib

from quire.config.worker import WorkerConfig
from quire.errors import EngineDeadError
from quire.executor.base import Executor
from quire.executor.orders import encoded
from quire.protocol.cache import CacheLayout, CacheReport
from quire.protocol.step import SampleGuide, StepPlan, StepResult
from quire.protocol.worker import WorkerCall, WorkerReply, WorkerReport
from quire.worker.keeper import Keeper
from quire.worker.worker import Worker


class InProcessExecutor(Executor):
    """One worker in this process and thread: a plan is computed when it is submitted, and sampled when collected.

    On a device that computes beside the host, two are in flight: one is computed while the other's result is read.

    Where it is one of several ranks, each has an engine of its own, and all of them have to plan alike.

    Args:
        config: what the worker runs.
    """

    computes_in_submit = True

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._keeper: Keeper | None = None

    def start(self, progress: bool) -> WorkerReport:
        self._keeper = Keeper(self._config)
        if self.worker.device.group is not None:
            self.plans_alike, self.clock = True, self.worker.device.clock
        if (most := self.worker.max_in_flight) > 1:
            self.max_in_flight, self.computes_in_submit = most, False
        self.report = self.worker.load(progress and self._config.rank == 0)
        return self.report

    @property
    def worker(self) -> Worker:
        """The live worker."""
        assert self._keeper is not None, "the executor is not started, or is stopped"
        return self._keeper.worker

    def cache_report(self) -> CacheReport:
        report, group = self.worker.cache_report(), self.worker.device.group
        return report if group is None else group.agree(report)

    def initialize_cache(self, layout: CacheLayout) -> None:
        self.worker.initialize_cache(layout)

    def submit(self, plan: StepPlan) -> None:
        if (group := self.worker.device.group) is not None and group.agree(own := zlib.crc32(encoded(plan))) != own:
            raise EngineDeadError(
                f"rank {group.rank} of {group.size} planned another step than rank 0; all ranks must run the same "
                "program, with the same prompts and parameters in the same order."
            )
        self.worker.begin(plan)

    def collect(self, guide: SampleGuide | None = None) -> StepResult:
        return self.worker.finish(guide)

    def reset(self) -> None:
        self.worker.reset()

    def call(self, call: WorkerCall) -> list[WorkerReply]:
        assert self._keeper is not None, "the executor is not started, or is stopped"
        return [self._keeper.call(call)]

    def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        self._keeper = None
