"""A scheduler that is stepped by hand: tests read its plans and say what was sampled."""

from collections.abc import Callable
from typing import Any

import pytest

from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.kvcache.manager import KVManager
from quire.protocol.step import NewRequest, SequenceOutput, StepPlan, StepResult
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler


class Driver:
    """A scheduler with blocks of 4 tokens; `step` samples token 7 unless told otherwise."""

    def __init__(self, num_blocks: int = 100, caching: bool = True, **config: Any) -> None:
        config = {"max_model_len": 200, "max_num_batched_tokens": 100, "max_num_seqs": 8, **config}
        self.kv = KVManager(CacheConfig(num_blocks, 4, caching))
        self.scheduler = Scheduler(SchedulerConfig(**config), self.kv)
        self.plan: StepPlan | None = None
        self.names: dict[int, str] = {}  # sequence_id -> request_id, or request_id/index
        self.num_added = 0

    def add(self, request_id: str, prompt: int | list[int] = 5, max_tokens: int = 20, **fields: Any) -> None:
        """Add a request; a number stands for a prompt of that length that nobody else has."""
        self.num_added += 1
        if isinstance(prompt, int):
            prompt = [self.num_added * 1000 + i for i in range(prompt)]
        stop_token_ids = fields.pop("stop", frozenset())
        request = {name: fields.pop(name) for name in ("priority", "arrival_time", "cache_salt") if name in fields}
        first = fields.pop("first_sequence_index", 0)
        self.scheduler.add(
            NewRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=max_tokens, **fields),
                max_tokens=max_tokens,
                stop_token_ids=frozenset(stop_token_ids),
                seed=1,
                first_sequence_index=first,
                **request,
            )
        )

    def schedule(self) -> dict[str, int]:
        """Plan a step; returns request -> tokens computed (forks as "id/index")."""
        self.plan = self.scheduler.schedule()
        for new in self.plan.new_sequences:
            self.names[new.sequence_id] = (
                f"{new.request_id}/{new.sequence_index}" if new.sequence_index else new.request_id
            )
        return {self.names[s.sequence_id]: s.num_new_tokens for s in self.plan.scheduled}

    def removed(self) -> list[str]:
        """Whose rows the last plan drops."""
        assert self.plan is not None
        return [self.names[sequence_id] for sequence_id in self.plan.removed_sequence_ids]

    def update(self, token: int | Callable[[str, int], int] = 7, **result: Any) -> list[SequenceOutput]:
        """Take in a result of the last plan; `token` may depend on name and sample."""
        assert self.plan is not None
        token_ids = [
            token(self.names[s.sequence_id], i) if callable(token) else token
            for s in self.plan.scheduled
            for i in range(s.num_samples)
        ]
        ids = {name: sequence_id for sequence_id, name in self.names.items()}
        result = {field: {ids[name]: value for name, value in by_name.items()} for field, by_name in result.items()}
        outputs = self.scheduler.update(self.plan, StepResult(step_id=self.plan.step_id, token_ids=token_ids, **result))
        self.scheduler.check_integrity()
        return outputs

    def step(self, token: int | Callable[[str, int], int] = 7, **result: Any) -> list[SequenceOutput]:
        """Plan a step and take in its result."""
        self.schedule()
        return self.update(token, **result)

    def finish(self, max_steps: int = 1000) -> dict[str, str]:
        """Step until idle; returns "request/index" -> finish_reason."""
        ends: dict[str, str] = {}
        while self.scheduler.has_unfinished():
            assert (max_steps := max_steps - 1), "does not end"
            for output in self.step():
                if output.finish_reason:
                    ends[f"{output.request_id}/{output.sequence_index}"] = output.finish_reason
        assert self.kv.num_free_blocks == self.kv.num_blocks
        return ends


@pytest.fixture
def driver() -> type[Driver]:
    return Driver
