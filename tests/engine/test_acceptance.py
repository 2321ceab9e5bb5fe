"""Acceptance by rules: the model's distribution, and answers that repeat whatever the batch."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import ChiSquare, raw_logprobs, target
from test_exactness import drain, engine, run, submit

from quire import LLM, LLMEngine, SamplingParams
from quire.errors import InvalidRequestError
from quire.sampling.random import DRAFT, random_bits
from quire.speculative.base import DraftedSequence, Proposer

TEXT = " the old man and his good dog in the big house of her little boy and the old cat"
PROMPT = TEXT * 2 + " and the"
DEMO = {"model": "demo", "max_num_batched_tokens": 2048, "max_num_seqs": 256, "num_kv_blocks": 4096}
FAST = DEMO | {"debug": False, "enable_prefix_caching": True}


class BadProposer(Proposer):
    """Draws from a distribution that it knows and that is not the model's: tokens of the prompt, by their order."""

    max_drafts = 3
    from_prefix = True

    def __init__(self, vocab_size: int, token_ids: Sequence[int]) -> None:
        self.probs = np.zeros(vocab_size)
        for place, token_id in enumerate(token_ids):
            self.probs[token_id] += 0.8**place
        self.probs /= self.probs.sum()

    def propose(self, rows: Sequence[DraftedSequence], hidden: torch.Tensor) -> list[list[int]]:
        found = []
        for row in rows:
            keys = [(row.sequence_id, 1, row.tokens.position + j) for j in range(row.max_drafts)]
            bits = [random_bits(*key, DRAFT) / 2**64 for key in keys]
            found.append(np.searchsorted(np.cumsum(self.probs), bits, side="right").tolist())
            row.probs = torch.from_numpy(np.stack([self.probs] * row.max_drafts))
        return found


def drafting(method: str, acceptance: str, k: int = 3) -> dict[str, Any]:
    adaptive = {} if acceptance == "typical" else {"adaptive": False}
    model = {"model": "demo-" + method.removesuffix("_model")} if method in ("draft_model", "medusa", "eagle") else {}
    return {"method": method, "num_speculative_tokens": k, "acceptance": acceptance} | adaptive | model


@pytest.fixture(scope="module")
def demo() -> LLMEngine:
    return engine(FAST, "float32", max_logprobs=-1)


def distribution_of(
    one: LLMEngine, plain: LLMEngine, params: SamplingParams, num: int, prompt: str = PROMPT
) -> ChiSquare:
    """Two tokens of many seeds after a first one, against what the model says of them by itself."""
    token_ids = ids_of(prompt)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for start in range(0, num, 1024):
        for seed in range(start, min(num, start + 1024)):
            own = params.clone()
            own.seed, own.max_tokens, own.ignore_eos = seed, 5, True
            submit(one, seed, token_ids, own)
        for output in _outputs(one):
            tokens = tuple(output.outputs[0].token_ids)
            groups[tokens[:1]].append(tokens[1])
            groups[tokens[:2]].append(tokens[2])
    chi_square = ChiSquare()
    known = SamplingParams(logprobs=-1, max_tokens=1, temperature=0)
    likely = sorted((key for key in groups if len(groups[key]) >= 40), key=lambda key: -len(groups[key]))
    for key in likely[:24]:
        submit(plain, 0, [*token_ids, *key], known)
        (output,) = _outputs(plain)
        chi_square.add(groups[key], target(raw_logprobs(output), params, key))
    return chi_square


@cache
def ids_of(text: str) -> list[int]:
    return LLM("demo").get_tokenizer().encode(text)


def _outputs(one: LLMEngine) -> list[Any]:
    found = []
    while one.has_unfinished_requests():
        found += [output for output in one.step() if output.finished]
    return found


KINDS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 8},
    {"temperature": 1.0, "top_k": 30, "presence_penalty": 0.8, "frequency_penalty": 0.5},
]
METHODS = ["ngram", "draft_model", "bad"]


def check_distribution(plain: LLMEngine, method: str, acceptance: str, kind: dict[str, Any], num: int) -> ChiSquare:
    proposer = None
    if method == "bad":
        proposer = BadProposer(plain.config.model.vocab_size, ids_of(TEXT)[:12])
    config = drafting("ngram" if proposer else method, acceptance)
    one = engine(FAST, "float32", proposer=proposer, speculative_config=config)
    found = distribution_of(one, plain, SamplingParams(**kind, allowed_token_ids=sorted(set(ids_of(TEXT)))), num)
    stats = one.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens > num / 50, "nothing was accepted, so nothing was tested"
    assert stats.num_accepted_tokens < stats.num_draft_tokens, "nothing was refused"
    assert found.freedom > 8, found
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "acceptance", "kind"),
    [("bad", "rejection", 4), ("draft_model", "rejection", 2)],
)
def test_the_distribution_is_the_models(demo: LLMEngine, method: str, acceptance: str, kind: int) -> None:
    found = check_distribution(demo, method, acceptance, KINDS[kind], 500)
    assert found.fits, found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "exact"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(f"{name}={value}" for name, value in kind.items()))
def test_the_distribution_is_the_models_in_all_ways(
    demo: LLMEngine, method: str, acceptance: str, kind: dict[str, Any]
) -> None:
    found = check_distribution(demo, method, acceptance, kind, 20_000)
    assert found.fits, found


def less_of_the_last(output_ids: list[int], logits: Any) -> Any:
    """Looks back."""
    if output_ids:
        logits[output_ids[-1]] -= 3.0
    return logits


REPEATED: list[dict[str, Any]] = [
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "n": 3, "logprobs": 0},
    {"temperature": 1.0, "top_k": 20, "presence_penalty": 0.4},
    {"temperature": 0, "logprobs": 1},
    {"temperature": 0.6, "min_p": 0.05, "logits_processors": [less_of_the_last], "min_tokens": 9},
    {"temperature": 0.9, "logit_bias": {300: 2.0}, "stop_token_ids": [12, 13]},
    {"temperature": 0.3, "prompt_logprobs": 1},
]
ALONE = {"max_num_seqs": 1, "max_model_len": 160, "enable_prefix_caching": False}
WAYS: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 32},
    "small budget": {"max_num_batched_tokens": 9, "max_num_seqs": 7, "block_size": 8},
    "preempted": {"num_kv_blocks": 12, "block_size": 16, "max_num_seqs": 7},
    "late": {"late": True, "max_num_seqs": 7},
    "late and preempted": {"late": True, "num_kv_blocks": 12, "block_size": 16, "max_num_batched_tokens": 40},
    "swapped": {"num_kv_blocks": 12, "block_size": 16, "swap_space": 0.01, "enable_prefix_caching": True},
}


def repeated(method: dict[str, Any], **options: Any) -> tuple[list[Any], LLMEngine]:
    todo = [
        (ids_of(TEXT * 2)[i:], SamplingParams(seed=i, max_tokens=32, **({"logprobs": 0} | kind)))
        for i, kind in enumerate(REPEATED)
    ]
    one = engine(DEMO, "float32", speculative_config=method, **({"max_model_len": 160} | options))
    return run(one, todo, len(todo)), one


@pytest.fixture(scope="module")
def alone() -> Any:
    known: dict[str, list[Any]] = {}

    def found(method: dict[str, Any]) -> list[Any]:
        if str(method) not in known:
            known[str(method)], one = repeated(method, **ALONE)
            stats = one.stats().speculation
            assert stats is not None
            assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens
        return known[str(method)]

    return found


def check_repeated(alone: Any, method: dict[str, Any], way: str) -> None:
    found, one = repeated(method, **WAYS[way])
    assert found == alone(method)
    assert (one.stats().num_preemptions_total > 0) == ("num_kv_blocks" in WAYS[way])


@pytest.mark.parametrize(
    ("method", "acceptance", "way"),
    [
        pytest.param("draft_model", "rejection", "late and preempted", marks=pytest.mark.slow),
        ("ngram", "typical", "late and preempted"),
    ],
)
def test_answers_repeat(alone: Any, method: str, acceptance: str, way: str) -> None:
    check_repeated(alone, drafting(method, acceptance), way)


RULES = [
    ("draft_model", "rejection"),
    ("draft_model", "typical"),
    ("ngram", "typical"),
    ("suffix", "typical"),
    ("medusa", "typical"),
]
# Every second one, but of nightly runs; two of the others are those of `test_answers_repeat`.
REPETITIONS = [
    pytest.param(*rule, way, marks=() if (i + j) % 2 else pytest.mark.nightly)
    for i, rule in enumerate(RULES)
    for j, way in enumerate(WAYS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "acceptance", "way"), REPETITIONS)
def test_answers_repeat_whatever_the_batch(alone: Any, method: str, acceptance: str, way: str) -> None:
    check_repeated(alone, drafting(method, acceptance), way)


@pytest.mark.slow
def test_how_many_drafts_there_are_changes_nothing_under_rejection(alone: Any) -> None:
    """Not even whether they pay, which the clock says."""
    known = alone(drafting("draft_model", "rejection"))
    for changes in ({"num_speculative_tokens": 8}, {"adaptive": True}, {"disable_by_batch_size": 3}):
        assert repeated(drafting("draft_model", "rejection") | changes, max_num_seqs=7)[0] == known


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "medusa", "eagle"])
def test_rejection_of_certain_drafts_is_exact(alone: Any, method: str) -> None:
    assert repeated(drafting(method, "rejection"))[0] == repeated(drafting(method, "exact"), **ALONE)[0]


@pytest.mark.slow
def test_who_begins_anew_has_its_drafts() -> None:
    """A scheduler whose workers have forgotten all judges the drafts that it had, under "typical"."""
    method = drafting("ngram", "typical", 8)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, logprobs=0)
    whole = engine(DEMO, "float32", speculative_config=method)
    submit(whole, 0, ids_of(TEXT * 2), params)
    known = drain(whole)["0"]
    for num_steps in (3, 6, 9):
        again = engine(DEMO, "float32", speculative_config=method)
        submit(again, 0, ids_of(TEXT * 2), params)
        for _ in range(num_steps):
            again.step()
        again.core.scheduler.cancel()
        again.executor.reset()
        assert drain(again)["0"] == known


@pytest.mark.parametrize(("method", "acceptance"), [("medusa", "rejection"), ("medusa", "typical")])
def test_drafts_are_counted_and_logprobs_refused_as_under_exact(method: str, acceptance: str) -> None:
    llm = LLM("demo", speculative_config=drafting(method, acceptance) | {"disable_logprobs": True})
    llm.generate([TEXT] * 3, SamplingParams(seed=1, max_tokens=24, temperature=0.7), use_tqdm=False)
    stats = llm.get_metrics().speculation
    assert stats is not None
    assert 0 < stats.num_drafts < stats.num_draft_tokens
    assert 0 < stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos)
    assert stats.num_accepted_tokens_per_pos == sorted(stats.num_accepted_tokens_per_pos, reverse=True)
    with pytest.raises(InvalidRequestError, match="disable_logprobs"):
        llm.generate(TEXT, SamplingParams(logprobs=1), use_tqdm=False)


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_greedy_requests_are_exact(acceptance: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, repetition_penalty=1.1)
    found = [
        LLM("demo", **options).generate([TEXT, PROMPT], params, use_tqdm=False)
        for options in ({}, {"speculative_config": drafting("draft_model", acceptance)})
    ]
    known, drafted = ([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs] for outputs in found)
    assert known == drafted
