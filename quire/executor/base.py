"""The executor contract: the door between the engine, which plans, and the workers, which compute.

The engine core calls it and never a worker. Executors differ only in transport: in this process, in others on this
machine, on other machines.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from quire.protocol.cache import MemoryReport
from quire.protocol.step import StepPlan, StepResult


class Executor(ABC):
    """Runs step plans on one or more workers."""

    @abstractmethod
    def start(self, progress: bool) -> str:
        """Start the workers and load the model; returns a line for the log (files, bytes, seconds)."""

    @abstractmethod
    def memory_report(self) -> MemoryReport:
        """Measured after loading: what the KV cache may take. The smallest figures among the workers."""

    @abstractmethod
    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the KV cache on every worker; comes once, before the first execute."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one step; any exception means that the executor is dead."""

    @abstractmethod
    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call the function on each worker's model (inspection, surgery); one result per worker."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError when a worker's rows are inconsistent; for tests and debug mode."""

    @abstractmethod
    def stop(self) -> None:
        """Release the workers; safe to call twice."""
