"""The executor contract: the door between the engine, which plans, and the workers, which compute.

The engine core calls it and never a worker. Executors differ only in transport: in this process, in others on this
machine, on other machines. What crosses is of `quire.protocol`; no tensor, no sentence and no function does.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from quire.protocol.cache import CacheLayout, CacheReport
from quire.protocol.step import SampleGuide, StepPlan, StepResult
from quire.protocol.worker import WorkerCall, WorkerReply, WorkerReport


class Executor(ABC):
    """Runs step plans on one or more workers, in the order in which they were submitted.

    Any exception from `submit`, `collect` or `call` but KeyboardInterrupt means that the executor is dead.

    Attributes:
        max_in_flight: plans that may be submitted before the oldest is collected, >= 1.
        computes_in_submit: whether `submit` computes the plan before it returns; only one is in flight then.
        plans_alike: other engines plan the very steps that this one does, and nothing may depend on who is quicker.
        clock: seconds; the same for all engines that plan alike.
        report: what `start` answered; None before.
    """

    max_in_flight: int = 1
    computes_in_submit: bool = False
    plans_alike: bool = False
    clock: Callable[[], float] = staticmethod(time.monotonic)
    report: WorkerReport | None = None

    @abstractmethod
    def start(self, progress: bool) -> WorkerReport:
        """Start the workers and load the model, with progress bars if asked for.

        Raises:
            ConfigError: the options don't suit the model.
            ModelLoadError: the model's files are missing or broken.
        """

    @abstractmethod
    def cache_report(self) -> CacheReport:
        """Measured after loading: what the KV cache may take. The smallest figures among the workers."""

    @abstractmethod
    def initialize_cache(self, layout: CacheLayout) -> None:
        """Allocate the KV cache on every worker; comes once, before the first plan."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Begin a step; results are collected in the order of submission."""

    @abstractmethod
    def collect(self, guide: SampleGuide | None = None) -> StepResult:
        """Wait for the oldest submitted plan; `guide` says which tokens it may draw."""

    @abstractmethod
    def reset(self) -> None:
        """Drop plans that were not collected, and every row and request: all will be announced again.

        It follows an interrupt anywhere in `submit` or `collect`, so it may rely on no row being whole. What is in the
        KV cache stays.
        """

    @abstractmethod
    def call(self, call: WorkerCall) -> list[WorkerReply]:
        """Ask every worker for something; one reply a worker."""

    def check(self) -> None:  # noqa: B027 - nothing to see where nothing can end by itself
        """Look whether the workers are alive, for who has nothing to submit.

        Raises:
            EngineDeadError: one is not; it says which, and what happened.
        """

    @abstractmethod
    def stop(self) -> None:
        """Release the workers; safe to call twice."""
