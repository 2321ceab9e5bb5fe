"""A worker under hand-written plans: a scheduler of a few lines, and a proposer of recorded tokens."""

import random
from collections.abc import Sequence
from typing import Any

from quire import SamplingParams
from quire.executor.inprocess import InProcessExecutor
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import (
    Fork,
    Moves,
    NewSequence,
    SampleGuide,
    Sampling,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
)
from quire.protocol.worker import CallReply, CheckIntegrity
from quire.speculative.base import DraftedSequence, Proposer

VOCAB, BLOCK_SIZE, MAX_DRAFTS = 61, 8, 3


class RecordedProposer(Proposer):
    """Drafts the tokens of recorded runs, each right with probability `p`, by sequence id."""

    max_drafts, uses_hidden = MAX_DRAFTS, True

    def __init__(self, runs: dict[int, list[int]], p: float) -> None:
        self.runs = runs
        self.p = p
        self.rng = random.Random(3)

    def propose(self, rows: Sequence[DraftedSequence], hidden: Any) -> list[list[int]]:
        assert len(hidden) == len(rows)
        drafts = []
        for row in rows:
            position = row.tokens.num - row.tokens.num_prompt
            right = self.runs[row.sequence_id][position : position + self.rng.randint(0, MAX_DRAFTS)]
            drafts.append([t if self.rng.random() < self.p else self.rng.randrange(VOCAB) for t in right])
        return drafts


class Driver:
    """Plans for an executor: every sequence has blocks of its own, enough for all that it can become."""

    def __init__(self, executor: InProcessExecutor, num_blocks: int) -> None:
        self.executor = executor
        self.step_id = 0
        self.free = list(range(1, num_blocks))
        self.num_tokens: dict[int, int] = {}  # known, by sequence
        self.computed: dict[int, int] = {}
        self.drafts: dict[int, int] = {}
        self.num_drafted = self.num_accepted = 0

    def blocks(self, count: int) -> list[list[int]]:
        taken, self.free = self.free[:count], self.free[count:]
        return [taken]

    def add(self, sequence_id: int, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """The parts of a plan that announce a request of one sequence."""
        task = {"max_tokens": 50, "stop_token_ids": frozenset(), "seed": 5}
        task |= {name: fields.pop(name) for name in ("seed", "bad_words_token_ids") if name in fields}
        request = NewRequest(
            request_id=f"r{sequence_id}",
            prompt_token_ids=prompt,
            task=SamplingTask(params=SamplingParams(**fields), **task),
        )
        self.num_tokens[sequence_id], self.computed[sequence_id], self.drafts[sequence_id] = len(prompt), 0, 0
        new = NewSequence(sequence_id, request.request_id, 0, [], self.blocks(12), 0)
        return {"new_requests": [request], "new_sequences": [new]}

    def next(self, sequence_id: int, **fields: Any) -> ScheduledSequence:
        """All tokens that are known, and the drafts."""
        num_drafts = self.drafts[sequence_id]
        count = self.num_tokens[sequence_id] - self.computed[sequence_id] + num_drafts
        return ScheduledSequence(sequence_id, count, **({"sampling": Sampling.DRAW, "num_drafts": num_drafts} | fields))

    def plan(self, scheduled: list[ScheduledSequence], **parts: Any) -> StepPlan:
        """The next plan, of these parts."""
        self.step_id += 1
        names = ("removed_sequence_ids", "ended_request_ids", "new_requests", "new_sequences", "forks")
        empty: dict[str, Any] = {name: [] for name in names}
        empty["moves"] = Moves()
        return StepPlan(step_id=self.step_id, scheduled=scheduled, **(empty | parts))

    def step(
        self, scheduled: list[ScheduledSequence], guide: SampleGuide | None = None, **parts: Any
    ) -> list[SequenceResult]:
        """Carry out a plan of these parts."""
        plan = self.plan(scheduled, **parts)
        self.executor.submit(plan)
        result = self.executor.collect(guide)
        assert result.step_id == self.step_id
        for one, came in zip(scheduled, result.results, strict=True):
            refused = one.num_drafts + 1 - len(came.token_ids) if one.num_drafts else 0
            self.computed[one.sequence_id] += one.num_new_tokens - refused
            self.num_drafted += one.num_drafts
            self.num_accepted += one.num_drafts - refused
            self.num_tokens[one.sequence_id] += len(came.token_ids) if one.num_samples == 1 else 1
            self.drafts[one.sequence_id] = len(came.draft_token_ids)
        assert self.executor.call(CheckIntegrity(list(self.num_tokens))) == [CallReply(None)]
        return result.results

    def start(
        self, sequence_id: int, prompt: list[int], how: dict[str, Any] | None = None, **fields: Any
    ) -> list[SequenceResult]:
        """A first step of one request alone, scheduled as `how` says."""
        parts = self.add(sequence_id, prompt, **fields)
        return self.step([self.next(sequence_id, **(how or {}))], **parts)

    def fork(self, child: int, parent: int, token: int) -> Fork:
        """The child has copies of no blocks: the test sees to those that both write."""
        num = self.computed[parent]
        self.num_tokens[child], self.computed[child], self.drafts[child] = num + 1, num, 0
        return Fork(child, parent, 1, num, token)
