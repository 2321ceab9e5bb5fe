"""The engine core: the loop of schedule, execute, update.

`LLMEngine` (and later the engine process) drives it. It works on token ids alone: text, stop strings and progress
bars live above it, tensors below.
"""

from quire.config.engine_args import EngineConfig
from quire.errors import EngineDeadError
from quire.executor.base import Executor
from quire.protocol.step import NewRequest, SequenceOutput, StepPlan, StepResult
from quire.scheduler.scheduler import Scheduler


class EngineCore:
    """A scheduler and an executor, stepped together.

    Raises:
        EngineDeadError: from every call after the executor failed.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, executor: Executor) -> None:
        self.config = config
        self.scheduler = scheduler
        self.executor = executor
        self._dead: str | None = None
        self._in_flight: StepPlan | None = None
        self.first_scheduled: list[str] = []  # requests that were new, or back from a preemption, in the last step

    def add(self, request: NewRequest) -> None:
        """Queue a request (InvalidRequestError when it can never fit, or its id is taken)."""
        self._check_alive()
        self.scheduler.add(request)

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """End a request now; returns the final output of each sequence that was not finished."""
        return self.scheduler.abort(request_id)

    def finish_sequence(self, request_id: str, sequence_index: int) -> None:
        """End one sequence whose stop string was found upstairs."""
        self.scheduler.finish_sequence(request_id, sequence_index)

    def has_unfinished(self) -> bool:
        """Whether a step has anything to do; on a dead engine it will say so."""
        return self.scheduler.has_unfinished()

    def step(self) -> list[SequenceOutput]:
        """One iteration: which tokens, compute them, what came of it."""
        self._check_alive()
        plan = self._in_flight = self.scheduler.schedule()
        self.first_scheduled = [new.request_id for new in plan.new_sequences]
        try:
            result = self.executor.execute(plan)
        except Exception as error:
            self._dead = f"{type(error).__name__}: {error}"
            raise EngineDeadError("the executor failed in a step; the engine can't go on") from error
        outputs = self.scheduler.update(plan, result)
        self._in_flight = None
        if self.config.args.debug:
            self.check_integrity()
        return outputs

    def cancel_step(self) -> list[SequenceOutput]:
        """After an interrupt (Ctrl-C) in `step`: fail the half-done step's sequences, so that the engine can go on."""
        plan, self._in_flight = self._in_flight, None
        if plan is None:
            return []
        failed = {s.sequence_id: "interrupted" for s in plan.scheduled}
        tokens = [-1] * sum(s.num_samples for s in plan.scheduled)
        return self.scheduler.update(plan, StepResult(step_id=plan.step_id, token_ids=tokens, errors=failed))

    def check_integrity(self) -> None:
        """Raise AssertionError when scheduler, KV cache or rows are inconsistent."""
        self.scheduler.check_integrity()
        self.executor.check_integrity()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine is dead since a step failed ({self._dead})")
