"""The model runner under hand-written plans: drafts, forks, ranks, masks, failures, prompt logprobs."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from driving import MAX_DRAFTS, VOCAB, Driver, RecordedProposer
from torch import Tensor

from quire.ops.native.library import library
from quire.protocol.step import FailureKind, Moves, SampleGuide, Sampling, ScheduledSequence, SequenceResult
from quire.protocol.worker import CallReply, CheckIntegrity
from quire.speculative.base import ComputedSpan, DraftedSequence, Proposer

PROMPTS = {1: [5, 9, 12, 33, 2, 8, 8, 17, 20, 41], 2: [7, 7, 7], 3: list(range(3, 40))}


def only_after_even(prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
    """A processor that looks back: it sees a wrong draft if anyone shows it one."""
    assert len(prompt_ids) == 37
    if output_ids and output_ids[-1] % 2:
        logits[::2] = -np.inf
    return logits


PARAMS: dict[int, dict[str, Any]] = {
    1: {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.3},
    2: {"temperature": 1.0, "logprobs": 2, "presence_penalty": 0.5, "frequency_penalty": 0.4, "top_p": 0.9},
    3: {
        "temperature": 0.8,
        "logprobs": 1,
        "logits_processors": [only_after_even],
        "bad_words_token_ids": [[4, 6], [9]],
    },
}


def run(driver: Driver, num: int) -> dict[int, list[tuple[int, Any]]]:
    """Tokens and logprobs of the three sequences, `num` of each."""
    found: dict[int, list[tuple[int, Any]]] = {s: [] for s in PROMPTS}
    parts: dict[str, Any] = {"new_requests": [], "new_sequences": []}
    for s, prompt in PROMPTS.items():
        for name, part in driver.add(s, prompt, **PARAMS[s]).items():
            parts[name] += part
    while any(len(tokens) < num for tokens in found.values()):
        results = driver.step([driver.next(s) for s in PROMPTS], **parts)
        parts = {}
        for s, result in zip(PROMPTS, results, strict=True):
            assert result.failure is None
            assert result.logprobs is not None
            found[s] += zip(result.token_ids, result.logprobs, strict=True)
    return {s: tokens[:num] for s, tokens in found.items()}


@pytest.mark.parametrize("p", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_drafts_change_neither_tokens_nor_logprobs(drive: Callable[..., Driver], p: float, kernels: str) -> None:
    plain = run(drive(kernels=kernels), 30)
    proposer = RecordedProposer({s: [t for t, _ in tokens] for s, tokens in plain.items()}, p)
    driver = drive(proposer, kernels)
    assert run(driver, 30) == plain
    drafted, accepted = driver.num_drafted, driver.num_accepted
    assert drafted > 30
    assert accepted < 20 if p == 0 else accepted > 20
    assert p < 1 or accepted == drafted
    if p == 1:
        assert driver.step_id < 25


def test_drafts_from_above_take_the_place_of_the_rows(drive: Callable[..., Driver]) -> None:
    plain = run(drive(), 8)
    driver = drive()
    driver.start(2, PROMPTS[2], **PARAMS[2])
    first, second, third = [token for token, _ in plain[2][1:4]]
    driver.drafts[2] = 3
    (result,) = driver.step([driver.next(2, draft_token_ids=[first, second, (third + 1) % VOCAB])])
    assert result.token_ids == [first, second, third]
    assert driver.executor.worker.runner.table.rows[2].num_computed == 3 + 3


def test_a_fork_goes_on_from_a_snapshot_and_parents_may_go(drive: Callable[..., Driver]) -> None:
    driver = drive()
    (result,) = driver.start(1, PROMPTS[1], {"num_samples": 3}, temperature=1.0, logprobs=1)
    assert len(result.token_ids) == 3
    # The prompt's last block is shared and not full: the child gets a copy of it, as its first write would demand.
    fork = driver.fork(8, 1, result.token_ids[1])
    table, copy = driver.executor.worker.runner.table, 99
    source = int(table.block_tables[0, table.rows[1].index, 1])
    del driver.num_tokens[1]
    (forked,) = driver.step(
        [driver.next(8, edits=[(0, 1, copy)], new_block_ids=driver.blocks(3))],
        removed_sequence_ids=[1],
        forks=[fork],
        moves=Moves(copies=[(0, source, copy)]),
    )
    apart = drive()
    parts = apart.add(8, PROMPTS[1], temperature=1.0, logprobs=1)
    parts["new_sequences"][0].output_token_ids.append(result.token_ids[1])
    apart.num_tokens[8] += 1
    request, new = parts["new_requests"], parts["new_sequences"][0]
    again = type(new)(8, new.request_id, 1, new.output_token_ids, new.block_ids, 0)
    assert apart.step([apart.next(8)], new_requests=request, new_sequences=[again]) == [forked]


def test_rank_names_the_best_after_processing_and_appends_nothing(drive: Callable[..., Driver]) -> None:
    driver = drive()
    params = {"temperature": 0.0, "logprobs": 0, "allowed_token_ids": [3, 4, 5, 6, 30]}
    (ranked,) = driver.start(2, PROMPTS[2], {"sampling": Sampling.RANK, "num_samples": 3}, **params)
    assert ranked.candidates is not None
    assert len(ranked.candidates.token_ids) == 3
    assert set(ranked.candidates.token_ids) <= {3, 4, 5, 6, 30}
    assert ranked.candidates.logprobs == sorted(ranked.candidates.logprobs, reverse=True)
    assert driver.executor.worker.runner.table.rows[2].tokens.num == 3

    (drawn,) = drive().start(2, PROMPTS[2], **params)
    assert drawn.token_ids == ranked.candidates.token_ids[:1]
    assert drawn.logprobs is not None
    assert drawn.logprobs[0].logprobs == ranked.candidates.logprobs[:1]


def test_what_the_scheduler_chooses_is_appended(drive: Callable[..., Driver]) -> None:
    driver = drive()
    driver.start(2, PROMPTS[2], {"sampling": Sampling.RANK, "num_samples": 3}, temperature=0.0, logprobs=0)
    driver.num_tokens[2] = 4
    (after,) = driver.step([driver.next(2, chosen_token_id=30)])
    (same,) = drive().start(2, [*PROMPTS[2], 30], temperature=0.0, logprobs=0)
    assert same == after
    assert driver.executor.worker.runner.table.rows[2].tokens.output() == [30, after.token_ids[0]]


def test_masks_hold_for_each_sampled_position(drive: Callable[..., Driver]) -> None:
    driver = drive()
    allowed = [[3, 40], [50], [60, 2]]
    masks = np.zeros((3, 2), np.uint32)
    for mask, ids in zip(masks, allowed, strict=True):
        for token in ids:
            mask[token // 32] |= np.uint32(1 << token % 32)
    guide = SampleGuide(step_id=1, masks=masks[:1].data.cast("B"), rows=[(1, 0)])
    parts = driver.add(1, PROMPTS[1], temperature=0.0)
    for name, part in driver.add(2, PROMPTS[2], temperature=1.0, logprobs=1).items():
        parts[name] += part
    free, bound = driver.step([driver.next(1), driver.next(2)], guide, **parts)
    assert bound.token_ids[0] in allowed[0]
    assert drive().start(1, PROMPTS[1], temperature=0.0) == [free]
    driver.drafts[2] = 2
    guide = SampleGuide(step_id=2, masks=masks.data.cast("B"), rows=[(0, 0), (0, 1), (0, 2)])
    (result,) = driver.step([driver.next(2, draft_token_ids=[3, 50])], guide)
    assert all(token in ids for token, ids in zip(result.token_ids, allowed, strict=False))
    if result.token_ids[0] == 3:
        assert result.token_ids[1] == 50
        assert len(result.token_ids) == 3
    else:
        assert result.token_ids == [40]


def test_one_that_fails_leaves_the_others_alone(drive: Callable[..., Driver], caplog: pytest.LogCaptureFixture) -> None:
    def broken(output_ids: list[int], logits: Any) -> Any:
        raise ValueError("no")

    driver = drive()
    parts = driver.add(2, PROMPTS[2], temperature=0.0, logits_processors=[broken])
    for name, part in driver.add(1, PROMPTS[1], temperature=0.0).items():
        parts[name] += part
    failed, good = driver.step([driver.next(2), driver.next(1)], **parts)
    assert failed.failure is not None
    assert failed.failure.kind == FailureKind.INTERNAL
    assert "'broken' raised ValueError" in failed.failure.message
    assert len(good.token_ids) == 1

    # Parameters of which no sampling state can be made; the client's id is quoted in the log.
    parts = driver.add(4, PROMPTS[2], temperature=0.0)
    request = parts["new_requests"][0]
    request.task.params.logit_bias = {"x": 1.0}  # as no check would let through
    request = type(request)(request_id="\x1b[2K\u2028", prompt_token_ids=PROMPTS[2], task=request.task)
    new = parts["new_sequences"][0]
    sequence = type(new)(4, request.request_id, 0, [], new.block_ids, 0)
    with caplog.at_level(logging.ERROR):
        (failed,) = driver.step([driver.next(4)], new_requests=[request], new_sequences=[sequence])
    assert failed.failure is not None
    assert failed.failure.kind == FailureKind.INTERNAL
    assert "'\\x1b[2K\\u2028'" in caplog.text


def test_prompt_logprobs_come_with_their_chunk(drive: Callable[..., Driver]) -> None:
    driver = drive()
    whole = driver.start(3, PROMPTS[3], temperature=0.0, prompt_logprobs=2)[0].prompt_logprobs
    assert whole is not None
    assert (whole.start, len(whole.entries)) == (1, 36)
    chunked = drive()
    parts = chunked.add(3, PROMPTS[3], temperature=0.0, prompt_logprobs=2)
    entries = []
    for count in (20, 17):
        one = chunked.next(3, sampling=Sampling.DRAW if count == 17 else Sampling.NONE)
        one = type(one)(3, count, one.sampling)
        (result,) = chunked.step([one], **parts)
        parts = {}
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs.start == len(entries) + 1
        entries += result.prompt_logprobs.entries
    assert entries == whole.entries
    assert chunked.step([chunked.next(3)])[0].prompt_logprobs is None


class SeenModel:
    """Notes which rows each step wants of a model, and how many it gets."""

    def __init__(self, model: Any) -> None:
        self.model, self.seen = model, list[tuple[list[int] | None, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, input_ids: Tensor, step: Any) -> Tensor:
        hidden = self.model(input_ids, step)
        self.seen.append((None if step.wanted is None else step.wanted.tolist(), len(hidden)))
        return hidden


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_model_is_asked_for_the_rows_that_are_sampled(drive: Callable[..., Driver], kernels: str) -> None:
    """The rest of a prompt's chunk only writes keys and values; every token is as if all rows had been made."""

    def watched() -> tuple[Driver, SeenModel]:
        driver = drive(kernels=kernels)
        runner = driver.executor.worker.runner
        runner.model = seen = SeenModel(runner.model)
        return driver, seen

    driver, seen = watched()
    parts: dict[str, list[Any]] = {"new_requests": [], "new_sequences": []}
    for s in (1, 3, 2):
        for name, part in driver.add(s, PROMPTS[s], temperature=0.0, logprobs=0).items():
            parts[name] += part
    chunk = ScheduledSequence(3, 30, Sampling.NONE)
    first = driver.step([driver.next(1), chunk, driver.next(2)], **parts)
    second = driver.step([driver.next(1), driver.next(2), driver.next(3)])
    driver.step([driver.next(1), driver.next(2), driver.next(3)])
    driver.start(4, PROMPTS[1], prompt_logprobs=1)
    native = kernels == "auto" and library() is not None
    assert seen.seen == [([9, 42], 2 if native else 43), ([0, 1, 8], 3 if native else 9), (None, 3), (None, 10)]
    driver, seen = watched()
    drawn = [driver.start(s, PROMPTS[s], temperature=0.0, logprobs=0)[0] for s in (1, 2, 3)]
    assert drawn == [first[0], first[2], second[2]]
    assert seen.seen[1] == ([2], 1 if native else 3)


def test_reset_forgets_a_step_half_done(drive: Callable[..., Driver]) -> None:
    driver = drive()
    plain = driver.start(1, PROMPTS[1], temperature=0.0)
    one = driver.next(1)
    driver.executor.submit(driver.plan([one]))
    driver.executor.reset()
    driver.num_tokens.clear()
    assert driver.executor.call(CheckIntegrity([])) == [CallReply(None)]
    assert driver.start(1, PROMPTS[1], temperature=0.0) == plain


def test_a_plan_may_have_nothing_to_compute(drive: Callable[..., Driver]) -> None:
    driver = drive()
    driver.start(2, PROMPTS[2], temperature=0.0)
    driver.num_tokens.clear()
    results: list[SequenceResult] = driver.step([], removed_sequence_ids=[2, 77], ended_request_ids=["r2"])
    assert results == []
    assert driver.executor.worker.runner.table.requests == {}


class WatchingProposer(Proposer):
    """Drafts nothing, and counts the tokens of each step that it is handed."""

    max_drafts, reads_all = MAX_DRAFTS, True

    def __init__(self) -> None:
        self.seen: list[int] = []

    def read(self, spans: Sequence[ComputedSpan], hidden: Tensor, taps: Sequence[Tensor]) -> None:
        self.seen.append(len(hidden))

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> list[list[int]]:
        return [[] for _ in rows]


def test_a_proposer_sees_what_is_computed_and_no_more(drive: Callable[..., Driver]) -> None:
    proposer = WatchingProposer()
    driver = drive(proposer)
    driver.start(2, PROMPTS[2], temperature=0.0)
    driver.step([driver.next(2)])
    driver.num_tokens.clear()
    driver.step([], removed_sequence_ids=[2], ended_request_ids=["r2"])
    assert proposer.seen == [len(PROMPTS[2]), 1]
