"""The in-process executor: one worker, called directly. The engine's default on a single device."""

from collections.abc import Callable
from typing import Any

from quire.config.engine_args import EngineConfig
from quire.executor.base import Executor
from quire.protocol.cache import MemoryReport
from quire.protocol.step import StepPlan, StepResult
from quire.worker.worker import Worker


class InProcessExecutor(Executor):
    """One worker in this process and thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker: Worker | None = None

    def start(self, progress: bool) -> str:
        self._worker = Worker(self._config)
        report = self._worker.load(progress)
        size = (
            f"{report.num_bytes / 2**20:.1f} MiB in {report.num_files} {'file' if report.num_files == 1 else 'files'}"
        )
        return f"weights: {size}, loaded in {report.seconds:.2f} s; {self._worker.describe()}"

    @property
    def worker(self) -> Worker:
        """The live worker."""
        assert self._worker is not None, "the executor is not started, or is stopped"
        return self._worker

    def memory_report(self) -> MemoryReport:
        return self.worker.memory_report()

    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        self.worker.initialize_cache(num_blocks, max_model_len)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.worker.execute(plan)

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        return [function(self.worker.model)]

    def check_integrity(self) -> None:
        self.worker.check_integrity()

    def stop(self) -> None:
        self._worker = None
