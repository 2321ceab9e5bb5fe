"""A scheduler that is stepped by hand: tests read its plans and say what was sampled."""

from collections.abc import Callable
from typing import Any

import pytest

from quire.config.scheduler import SchedulerConfig
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import (
    Failure,
    FailureKind,
    PromptLogprobs,
    Sampling,
    SequenceOutput,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.sampling_params import SamplingParams
from quire.scheduler.beams import continuation_of
from quire.scheduler.continuation import Continuation
from quire.scheduler.scheduler import Scheduler


class Driver:
    """A scheduler with blocks of 4 tokens; `step` samples token 7 unless told otherwise."""

    def __init__(
        self,
        num_blocks: int = 100,
        caching: bool = True,
        make_continuation: Callable[[SamplingTask], Continuation] = continuation_of,
        windows: dict[int, int] | None = None,
        **config: Any,
    ) -> None:
        """`windows`: of further KV groups, and the blocks of each."""
        config = {"max_model_len": 200, "max_num_batched_tokens": 100, "max_num_seqs": 8, **config}
        windows = windows or {}
        groups = [CacheGroup(layers=[number], window=window) for number, window in enumerate([None, *windows])]
        counts = [num_blocks, *windows.values()]
        layout = CacheLayout(block_size=4, groups=groups, num_blocks=counts, max_model_len=config["max_model_len"])
        self.kv = KVManager(layout, caching)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.kv, make_continuation)
        self.plan: StepPlan | None = None
        self.names: dict[int, str] = {}  # sequence_id -> request_id, or request_id/index
        self.num_added = 0
        self.now = 0.0
        self.candidates: TokenLogprobs | None = None  # of every sequence that ranks

    def add(self, request_id: str, prompt: int | list[int] = 5, max_tokens: int = 20, **fields: Any) -> None:
        """Add a request; a number stands for a prompt of that length that nobody else has."""
        self.num_added += 1
        if isinstance(prompt, int):
            prompt = [self.num_added * 1000 + i for i in range(prompt)]
        stop_token_ids = fields.pop("stop", frozenset())
        names = ("priority", "client", "ttft_target", "tpot_target", "arrival_time", "cache_salt")
        request = {name: fields.pop(name) for name in names if name in fields}
        first, eos_token_id = fields.pop("first_sequence_index", 0), fields.pop("eos_token_id", None)
        self.scheduler.add(
            NewRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                task=SamplingTask(
                    params=SamplingParams(max_tokens=max_tokens, **fields),
                    max_tokens=max_tokens,
                    stop_token_ids=frozenset(stop_token_ids),
                    eos_token_id=eos_token_id,
                    seed=1,
                    first_sequence_index=first,
                ),
                **request,
            ),
            now=self.now,
        )

    def schedule(self) -> dict[str, int]:
        """Plan a step; returns request -> tokens computed (forks as "id/index"), nothing where there is no plan."""
        plan = self.scheduler.schedule(self.now)
        if plan is None:
            return {}
        self.plan = plan
        for new in plan.new_sequences:
            self.names[new.sequence_id] = _name(new.request_id, new.sequence_index)
        for fork in plan.forks:
            request_id = self.names[fork.parent_id].split("/")[0]
            self.names[fork.sequence_id] = _name(request_id, fork.sequence_index)
        return {self.names[s.sequence_id]: s.num_new_tokens for s in plan.scheduled}

    def removed(self) -> list[str]:
        """Whose rows the last plan drops."""
        assert self.plan is not None
        return [self.names[sequence_id] for sequence_id in self.plan.removed_sequence_ids]

    def num_free(self) -> int:
        """Blocks that can be taken."""
        return self.kv.num_free_blocks[0]

    def num_preemptions(self) -> int:
        """Since the start."""
        return self.scheduler.stats().num_preemptions_total

    def waiting_reasons(self) -> dict[str, int]:
        """Why who waits."""
        return self.scheduler.stats().waiting_reasons

    def why(self, request_id: str) -> str | None:
        """Why a request waits; None when nothing of it waits."""
        shown = self.scheduler.snapshot(self.scheduler.stats(), 0.0, [request_id]).sequences
        return next((sequence.why for sequence in shown if sequence.request_id == request_id and sequence.why), None)

    def prefix_cache(self) -> tuple[int, int]:
        """Tokens looked up and found."""
        stats = self.scheduler.stats()
        return stats.prefix_cache_queries_total, stats.prefix_cache_hits_total

    def update(
        self,
        token: int | Callable[[str, int], int] = 7,
        *,
        plan: StepPlan | None = None,
        logprobs: dict[str, list[TokenLogprobs]] | None = None,
        prompt_logprobs: dict[str, PromptLogprobs] | None = None,
        errors: dict[str, str] | None = None,
        drafts: dict[str, list[int]] | None = None,
        tokens: dict[str, list[int]] | None = None,
        candidates: dict[str, list[int]] | None = None,
    ) -> list[SequenceOutput]:
        """Take in a result of the last plan, or of `plan`; `token` may depend on name and sample."""
        plan = plan or self.plan
        assert plan is not None
        results: list[SequenceResult] = []
        for item in plan.scheduled:
            name = self.names[item.sequence_id]
            if errors and name in errors:
                results.append(SequenceResult(failure=Failure(FailureKind.INTERNAL, errors[name])))
                continue
            drawn: list[int] = []
            if item.sampling is Sampling.DRAW:
                drawn = [token(name, i) if callable(token) else token for i in range(item.num_samples)]
            ranked = (candidates or {}).get(name)
            found = TokenLogprobs(ranked, [], []) if ranked else None
            if item.sampling is Sampling.RANK and found is None:
                found = self.candidates
            results.append(
                SequenceResult(
                    token_ids=(tokens or {}).get(name, drawn),
                    logprobs=(logprobs or {}).get(name),
                    draft_token_ids=(drafts or {}).get(name, []),
                    candidates=found,
                    prompt_logprobs=(prompt_logprobs or {}).get(name),
                )
            )
        self.now += 1.0
        outputs = self.scheduler.update(plan, StepResult(step_id=plan.step_id, results=results), self.now)
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


def _name(request_id: str, sequence_index: int) -> str:
    return f"{request_id}/{sequence_index}" if sequence_index else request_id


@pytest.fixture
def driver() -> type[Driver]:
    return Driver
