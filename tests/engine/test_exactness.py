"""Same request, same tokens and logprobs, bit for bit, whatever happens around it.

Each model runs one set of requests alone, one after another, without prefix cache: the baseline. Every other way of
running the same requests on the same kernels, weight format and cache type must give equal tokens and equal floats.
"""

import dataclasses
import itertools
import os
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from quire import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from quire.config.draft_tree import DraftTree
from quire.config.worker import WorkerConfig
from quire.engine.build import build_core, worker_config
from quire.executor.inprocess import InProcessExecutor
from quire.executor.select import select_executor
from quire.ops.native.library import TORCH, levels
from quire.protocol.step import SampleGuide, StepPlan, StepResult
from quire.sampling.accept import Rule
from quire.scheduler.policies.registry import POLICIES
from quire.speculative.base import DraftedSequence, Proposer
from quire.worker.judging import Judge
from quire.worker.speculation import Speculation

MODELS = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "gemma2", "gemma3", "opt", "gpt2", "stories260K", "demo"]
DTYPES = ["float32", "bfloat16"]
NUM_REQUESTS = 32 if os.environ.get("QUIRE_NIGHTLY") == "1" else 16  # each kind four times, or twice


class Variant(NamedTuple):
    """One way to run the set of requests."""

    together: int  # requests queued at once
    budget: int  # max_num_batched_tokens
    block_size: int
    prefix: bool  # prefix caching, and the whole set once more, to be found in the cache
    preempted: bool  # too few blocks for what runs
    late: bool  # two plans in flight, on a device that answers one step late
    policy: str  # who comes first; the requests have clients, priorities and targets of their own
    tier: str  # "host": a second memory for what is preempted or evicted; "disk": and prefixes outlive the engine
    chunked: bool = True


# Every value of every axis meets every value of every other one (a test below counts).
VARIANTS = [
    Variant(2, 16, 8, prefix=False, preempted=False, late=True, policy="priority", tier="host"),
    Variant(2, 16, 64, prefix=False, preempted=True, late=False, policy="fair", tier="none"),
    Variant(2, 64, 16, prefix=True, preempted=False, late=False, policy="fcfs", tier="disk"),
    Variant(2, 512, 8, prefix=True, preempted=False, late=False, policy="deadline", tier="disk"),
    Variant(2, 512, 16, prefix=True, preempted=False, late=False, policy="shortest", tier="none"),
    Variant(7, 16, 16, prefix=True, preempted=True, late=True, policy="deadline", tier="host"),
    Variant(7, 16, 64, prefix=False, preempted=False, late=True, policy="fcfs", tier="host"),
    Variant(7, 64, 8, prefix=False, preempted=True, late=False, policy="shortest", tier="host"),
    Variant(7, 512, 8, prefix=True, preempted=False, late=True, policy="fair", tier="none"),
    Variant(7, 512, 8, prefix=True, preempted=True, late=True, policy="fair", tier="disk"),
    Variant(7, 512, 64, prefix=True, preempted=True, late=False, policy="priority", tier="disk"),
    Variant(32, 16, 64, prefix=True, preempted=True, late=True, policy="shortest", tier="disk"),
    Variant(32, 64, 16, prefix=True, preempted=True, late=True, policy="priority", tier="none"),
    Variant(32, 64, 16, prefix=True, preempted=False, late=False, policy="fair", tier="host"),
    Variant(32, 64, 64, prefix=False, preempted=False, late=True, policy="deadline", tier="none"),
    Variant(32, 512, 8, prefix=True, preempted=True, late=True, policy="fcfs", tier="none"),
    Variant(32, 512, 16, prefix=False, preempted=False, late=False, policy="priority", tier="host"),
    Variant(7, 512, 16, prefix=False, preempted=False, late=False, policy="fcfs", tier="none", chunked=False),
]
SOME_VARIANTS = [VARIANTS[0], VARIANTS[9], VARIANTS[15]]
_FEWER_VARIANTS = [*(pytest.param(v, marks=pytest.mark.nightly) for v in SOME_VARIANTS[:2]), SOME_VARIANTS[2]]
_LIKE_OTHERS = ["mistral", "qwen2", "qwen3", "gemma2", "opt", "stories260K"]
SOME_MODELS = [pytest.param(m, marks=pytest.mark.nightly) if m in _LIKE_OTHERS else m for m in MODELS]
_OTHER_MODELS = [pytest.param(m, marks=pytest.mark.nightly) for m in MODELS if m not in ("mixtral", "gemma3")]
# A llama runs in each variant, and so does a Gemma 3, whose cache has two groups of layers. Of the others each has
# every third, but of nightly runs; and so each variant three of them.
_OF_FEWER_VARIANTS = [model for model in MODELS if model not in ("llama", "gemma3")]
_OF_LIKE_ONES = [
    pytest.param(model, variant, marks=pytest.mark.nightly if (i + j) % 3 else ())
    for i, model in enumerate(_OF_FEWER_VARIANTS)
    for j, variant in enumerate(VARIANTS)
]
FEW_BLOCKS = {8: 16, 16: 8, 64: 3}  # block size -> blocks that hold one or two contexts of 128 tokens


class LateExecutor(InProcessExecutor):
    """A device that answers one step late: a plan is computed when its result is asked for, and another waits."""

    max_in_flight = 2
    computes_in_submit = False

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.plans: deque[StepPlan] = deque()
        self.most = 0

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.most = max(self.most, len(self.plans))

    def collect(self, guide: SampleGuide | None = None) -> StepResult:
        super().submit(self.plans.popleft())
        return super().collect(guide)

    def reset(self) -> None:
        self.plans.clear()
        super().reset()


class RecordedProposer(Proposer):
    """Drafts from recorded runs, by prompt; each token is right with probability `p`."""

    max_drafts, uses_hidden = 4, True

    def __init__(self, runs: dict[tuple[int, ...], list[int]], p: float) -> None:
        self.runs, self.p, self.rng = runs, p, random.Random(3)

    def propose(self, rows: Sequence[DraftedSequence], hidden: torch.Tensor) -> list[list[int]]:
        assert len(hidden) == len(rows)
        drafts = []
        for row in rows:
            done = row.tokens.position
            right = self.runs[tuple(row.tokens.prompt())][done : done + self.rng.randint(0, self.max_drafts)]
            drafts.append([token if self.rng.random() < self.p else self.rng.randrange(150) for token in right])
        return drafts


def requests(vocab_size: int, num_requests: int = NUM_REQUESTS) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of many lengths, with common beginnings; greedy, seeded with penalties, forked, searched by beams."""
    rng, sizes = random.Random(11), random.Random(12)  # apart, so that every vocabulary gets the same lengths
    found = []
    shared: list[int] = []
    for i in range(num_requests):
        if i % 4 == 0:
            shared = [rng.randrange(3, vocab_size) for _ in range(sizes.choice([8, 17, 40, 64]))]
        tail = [rng.randrange(3, vocab_size) for _ in range(sizes.randrange(1, 24))]
        prompt = tail if i % 4 == 3 or i % 8 == 6 else shared + tail
        length = sizes.randrange(24, 37) if i % 4 < 2 else sizes.randrange(2, 10)
        if i % 2 == 0:
            params = SamplingParams(temperature=0, max_tokens=length, logprobs=3, ignore_eos=True)
        else:
            params = SamplingParams(
                temperature=0.9,
                top_p=0.9,
                top_k=20 if i % 8 == 1 else 0,
                min_p=0.02 if i % 8 == 3 else 0.0,
                seed=i,
                max_tokens=length,
                logprobs=2,
                presence_penalty=0.4,
                frequency_penalty=0.3,
                repetition_penalty=1.2,
                min_tokens=1,
                n=3 if i % 8 == 7 else 1,
            )
        if i % 8 == 5:
            params.prompt_logprobs = 2
        if i % 8 == 6:
            params = msgspec.structs.replace(params, use_beam_search=True, n=2, best_of=3)
        found.append((prompt, params))
    return found


def facts(output: RequestOutput) -> list[tuple[Any, ...]]:
    """All that a user can see of a request's tokens, floats included."""
    prompt = [p and {t: (x.logprob, x.rank) for t, x in p.items()} for p in output.prompt_logprobs or []]
    rows = []
    for c in output.outputs:
        assert c.logprobs is not None
        steps = [{t: (x.logprob, x.rank) for t, x in step.items()} for step in c.logprobs]
        rows.append((c.index, list(c.token_ids), c.cumulative_logprob, steps, c.finish_reason, prompt))
    return rows


def engine(
    options: dict[str, Any], dtype: str, *, late: bool = False, proposer: Proposer | None = None, **changes: Any
) -> LLMEngine:
    tree: DraftTree | None = changes.pop("tree", None)
    kind = LateExecutor if late else InProcessExecutor
    base = {
        "dtype": dtype,
        "max_model_len": 256,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "num_kv_blocks": 1024,
        "debug": True,
    }
    config = EngineArgs(**(options | base | changes)).resolve()
    if proposer is not None:
        scheduler = dataclasses.replace(config.scheduler, draft_tree=tree, max_num_drafts=proposer.max_drafts)
        config = dataclasses.replace(config, scheduler=scheduler)
    by_hand = late or proposer is not None
    executor = kind(worker_config(config)) if by_hand else select_executor(worker_config(config), config.args)
    core = build_core(config, show_progress=False, executor=executor)
    if proposer is not None and isinstance(executor, InProcessExecutor):
        runner = executor.worker.runner
        judge = Judge(runner.device.target, proposer, Rule()) if proposer.from_prefix else None
        runner.speculation = Speculation(runner.device, proposer, judge=judge)
    return LLMEngine(config.with_max_model_len(core.scheduler.config.max_model_len), core, None)


def drain(one: LLMEngine) -> dict[str, list[tuple[Any, ...]]]:
    found = {}
    while one.has_unfinished_requests():
        for output in one.step():
            if output.finished:
                found[output.request_id] = facts(output)
    one.check_integrity()
    return found


def submit(one: LLMEngine, number: int, prompt: list[int], params: SamplingParams) -> None:
    """Queue a request; who is served first differs with every policy."""
    processed = one.process_input(str(number), prompt, params)
    mine = {"client": "abc"[number % 3], "priority": number * 7 % 4, "ttft_target": 1000.0 + number * 5 % 11}
    one.submit(dataclasses.replace(processed, request=msgspec.structs.replace(processed.request, **mine)))


def run(one: LLMEngine, todo: list[tuple[list[int], SamplingParams]], together: int) -> list[Any]:
    found: dict[str, Any] = {}
    for low in range(0, len(todo), together):
        for i, (prompt, params) in list(enumerate(todo))[low : low + together]:
            submit(one, i, prompt, params)
        found |= drain(one)
    assert one.stats().kv_cache_usage_perc == 0, "idle means an empty pool"
    return [found[str(i)] for i in range(len(todo))]


@pytest.fixture(scope="module")
def baseline(model_options):
    """Each model's requests, alone; computed once per model, dtype and further engine options."""
    known: dict[tuple[Any, ...], list[Any]] = {}

    def alone(model: str, dtype: str, **options: Any) -> list[Any]:
        key = (model, dtype, *sorted(options.items()))
        if key not in known:
            one = engine(model_options(model), dtype, **options)
            known[key] = run(one, requests(one.config.model.vocab_size), together=1)
        return known[key]

    return alone


def changes_of(variant: Variant, folder: str) -> dict[str, Any]:
    """The options of a variant's engine; `folder`: for what outlives it."""
    changes: dict[str, Any] = {
        "max_num_batched_tokens": variant.budget,
        "block_size": variant.block_size,
        "enable_prefix_caching": variant.prefix,
        "enable_chunked_prefill": variant.chunked,
        "scheduling_policy": variant.policy,
        "swap_space": 0.0 if variant.tier == "none" else 0.01,  # GiB
    }
    if variant.preempted:
        changes |= {"num_kv_blocks": FEW_BLOCKS[variant.block_size], "max_model_len": 128}
    return changes | ({"kv_cache_dir": folder} if variant.tier == "disk" else {})


def check_variant(model_options, baseline, model: str, dtype: str, variant: Variant, **options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        changes = options | changes_of(variant, folder)
        check_runs(model_options(model), dtype, variant, changes, baseline(model, dtype, **options))


def check_runs(
    model: dict[str, Any], dtype: str, variant: Variant, changes: dict[str, Any], expected: list[Any]
) -> None:
    one = engine(model, dtype, late=variant.late, **changes)
    todo = requests(one.config.model.vocab_size)
    assert run(one, todo, variant.together) == expected
    stats = one.stats()
    assert not isinstance(one.executor, LateExecutor) or one.executor.most == 2, "nothing was in flight"
    if variant.preempted:
        assert stats.num_preemptions_total > 0, "nothing was preempted, so nothing was tested"
    if variant.prefix:
        assert run(one, todo, variant.together) == expected
        if not variant.preempted:
            hits = one.stats().prefix_cache_hits_total
            assert hits > stats.prefix_cache_hits_total, "no prefix was found again"
    one.executor.stop()
    if variant.tier == "disk":
        restarted = engine(model, dtype, late=variant.late, **changes)
        assert run(restarted, todo, variant.together) == expected
        tiers = restarted.stats().tiers
        assert tiers is not None
        assert tiers.disk_hits_total > 0, "no prefix has outlived the engine"
        restarted.executor.stop()


def test_the_variants_cover_every_pair_of_values() -> None:
    axes = [sorted({v[i] for v in VARIANTS if v.chunked}) for i in range(8)]
    assert [len(values) for values in axes] == [3, 3, 3, 2, 2, 2, len(POLICIES), 3]
    for i, j in itertools.combinations(range(8), 2):
        met = {(v[i], v[j]) for v in VARIANTS}
        impossible = {(False, "disk")} if (i, j) == (3, 7) else set()  # what it keeps are prefixes
        assert met >= set(itertools.product(axes[i], axes[j])) - impossible, f"axes {i} and {j}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "variant", [SOME_VARIANTS[0], pytest.param(SOME_VARIANTS[1], marks=pytest.mark.slow), SOME_VARIANTS[2]]
)
def test_exactness_llama(model_options, baseline, dtype: str, variant: Variant) -> None:
    check_variant(model_options, baseline, "llama", dtype, variant)


def check_drafts(
    model_options, baseline, model: str, dtype: str, p: float, late: bool, few_blocks: bool, **options: Any
) -> None:
    """The same requests with drafts; with `few_blocks`, under preemption."""
    expected = baseline(model, dtype, **options)
    changes: dict[str, Any] = options | (
        {"num_kv_blocks": 8, "block_size": 16, "max_model_len": 128} if few_blocks else {}
    )
    plain = engine(model_options(model), dtype, **options)
    todo = requests(plain.config.model.vocab_size)
    proposer = RecordedProposer(
        {tuple(prompt): rows[0][1] for (prompt, _), rows in zip(todo, expected, strict=True)}, p
    )
    one = engine(model_options(model), dtype, late=late, proposer=proposer, **changes)
    assert run(one, todo, together=7) == expected
    stats = one.stats()
    assert stats.speculation is not None
    num_drafts, num_accepted = stats.speculation.num_draft_tokens, stats.speculation.num_accepted_tokens
    assert num_drafts > 100
    assert num_accepted > 2 * NUM_REQUESTS if p else num_accepted < num_drafts / 4
    assert (stats.num_preemptions_total > 0) == few_blocks


@pytest.mark.parametrize(("p", "late", "few_blocks"), [(0.7, False, False), (1.0, True, False), (0.6, True, True)])
def test_drafts_change_nothing(model_options, baseline, p: float, late: bool, few_blocks: bool) -> None:
    check_drafts(model_options, baseline, "llama", "float32", p, late, few_blocks)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("model", SOME_MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("p", "late", "few_blocks"), [(0.0, True, False), (0.8, False, True)])
def test_drafts_change_nothing_matrix(
    model_options, baseline, model: str, dtype: str, p: float, late: bool, few_blocks: bool
) -> None:
    check_drafts(model_options, baseline, model, dtype, p, late, few_blocks)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in MODELS if model not in _OF_FEWER_VARIANTS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v)))
def test_exactness_matrix(model_options, baseline, model: str, dtype: str, variant: Variant) -> None:
    check_variant(model_options, baseline, model, dtype, variant)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(("model", "variant"), _OF_LIKE_ONES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exactness_matrix_of_like_models(model_options, baseline, model: str, dtype: str, variant: Variant) -> None:
    check_variant(model_options, baseline, model, dtype, variant)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral", "gemma3", *_OTHER_MODELS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", _FEWER_VARIANTS)
def test_exactness_on_plain_torch(model_options, baseline, model: str, dtype: str, variant: Variant) -> None:
    check_variant(model_options, baseline, model, dtype, variant, kernels=TORCH)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", _FEWER_VARIANTS)
def test_exactness_with_a_shared_expert(model_options, baseline, dtype: str, variant: Variant) -> None:
    check_variant(model_options, baseline, "qwen2-moe", dtype, variant)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("kernels", levels()[1:-1])
@pytest.mark.parametrize("model", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", SOME_VARIANTS)
def test_exactness_on_further_levels(
    model_options, baseline, model: str, dtype: str, variant: Variant, kernels: str
) -> None:
    check_variant(model_options, baseline, model, dtype, variant, kernels=kernels)


COMPRESSED: list[dict[str, str]] = [
    *({"quantization": name} for name in ("int8", "int4", "w8a8", "w4a8")),
    {"kv_cache_dtype": "int8"},
]


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("model", SOME_MODELS)
@pytest.mark.parametrize("options", COMPRESSED, ids=lambda o: "-".join(*o.items()))
@pytest.mark.parametrize("variant", _FEWER_VARIANTS)
def test_exactness_of_few_bits(
    model_options, baseline, model: str, variant: Variant, options: dict[str, str], native: str
) -> None:
    check_variant(model_options, baseline, model, "bfloat16", variant, **options)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["llama", "gpt2", *(pytest.param(m, marks=pytest.mark.nightly) for m in ("mistral", "demo"))]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", SOME_VARIANTS)
def test_exactness_on_two_threads(
    model_options, baseline, model: str, dtype: str, variant: Variant, two_threads
) -> None:
    """Against the baseline of one thread: the number of threads changes no bit either."""
    with two_threads(used=False):
        baseline(model, dtype)
    with two_threads(used=True):
        check_variant(model_options, baseline, model, dtype, variant)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("kernels", levels()[1:-1])
@pytest.mark.parametrize("options", [{}, *COMPRESSED], ids=str)
@pytest.mark.parametrize("variant", _FEWER_VARIANTS)
def test_exactness_of_few_bits_on_further_levels(
    model_options, baseline, variant: Variant, options: dict[str, str], kernels: str, two_threads
) -> None:
    """Alone on one thread, together on two."""
    with two_threads(used=False):
        baseline("llama", "bfloat16", kernels=kernels, **options)
    with two_threads(used=True):
        check_variant(model_options, baseline, "llama", "bfloat16", variant, kernels=kernels, **options)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_forks_equal_separate_requests(model_options, model: str, dtype: str, prefix_caching: bool) -> None:
    """n = 4 computes its prompt once; four requests that draw as its forks would give the same."""
    one = engine(model_options(model), dtype, enable_prefix_caching=prefix_caching, block_size=8)
    prompt = requests(one.config.model.vocab_size)[1][0][:21]
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=12, logprobs=2, repetition_penalty=1.1)
    one.add_request("forks", prompt, params)
    before = one.stats().prefix_cache_queries_total
    forks = drain(one)["forks"]
    assert len({tuple(row[1]) for row in forks}) > 1, "the forks drew the same tokens"

    single = params.clone()
    single.n = 1
    for i in range(4):
        processed = one.process_input(f"separate-{i}", prompt, single)
        task = msgspec.structs.replace(processed.request.task, first_sequence_index=i)
        request = msgspec.structs.replace(processed.request, task=task)
        one.submit(dataclasses.replace(processed, request=request))
    separate = drain(one)
    assert [separate[f"separate-{i}"][0][1:] for i in range(4)] == [row[1:] for row in forks]
    if prefix_caching:
        assert one.stats().prefix_cache_queries_total > before
