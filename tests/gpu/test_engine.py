"""An engine on a GPU: the same request, the same tokens, whatever runs beside it, captured or not, a step ahead or not.

Without a GPU the device is the CPU in its place: every kernel is Triton's, interpreted, and two steps are in flight.
"""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire
from quire import LLM, LLMEngine, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.gpu.conftest import HAS_GPU, TINY, Build, Devices, unrehearsed

Request = tuple[list[int], SamplingParams]


def requests(vocab_size: int = 199) -> list[Request]:
    """Greedy and drawn ones, with all that a sampler can be asked for, some with a common beginning."""
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab_size) for _ in range(20)]
    plain: dict[str, Any] = {"ignore_eos": True}
    drawn: dict[str, Any] = {"temperature": 0.9, **plain}
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    wanted = [
        SamplingParams(temperature=0, max_tokens=9, logprobs=2, **plain),
        SamplingParams(top_p=0.8, seed=1, max_tokens=7, **drawn),
        SamplingParams(top_k=7, min_p=0.05, seed=2, max_tokens=8, logprobs=0, **drawn),
        SamplingParams(seed=3, max_tokens=9, **penalties, **drawn),
        SamplingParams(temperature=0, max_tokens=3, logit_bias={5: 3.0, 9: -4.0}, **plain),
        SamplingParams(seed=4, max_tokens=6, min_tokens=4, stop_token_ids=[11, 12], allowed_token_ids=[*range(8, 60)]),
    ]
    prompts = [[rng.randrange(3, vocab_size) for _ in range(rng.randrange(2, 30))] for _ in wanted]
    return [(shared * (i % 2) + prompt, params) for i, (prompt, params) in enumerate(zip(prompts, wanted, strict=True))]


def facts(output: RequestOutput) -> Any:
    """All that a user can see of tokens, floats included."""
    found = []
    for one in output.outputs:
        steps = [{t: (x.logprob, x.rank) for t, x in step.items()} for step in one.logprobs or []]
        found.append((one.index, list(one.token_ids), steps, one.finish_reason))
    return found


def drain(engine: LLMEngine, asked: list[Request]) -> list[Any]:
    """Run them together."""
    for i, (prompt, params) in enumerate(asked):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: facts(output) for output in engine.step() if output.finished}
    return [found[str(i)] for i in range(len(asked))]


def alone(engine: LLMEngine, asked: list[Request]) -> list[Any]:
    return [drain(engine, [one])[0] for one in asked]


def assert_near(found: list[Any], expected: list[Any]) -> None:
    """The same but for rounding: tokens and ranks are equal, and logprobs differ in their last bits."""
    for ours, theirs in zip(found, expected, strict=True):
        for (index, tokens, steps, reason), (i, others, other_steps, why) in zip(ours, theirs, strict=True):
            assert (index, tokens, reason) == (i, others, why)
            for step, other in zip(steps, other_steps, strict=True):
                assert step.keys() == other.keys()
                for token, (logprob, rank) in step.items():
                    assert (pytest.approx(other[token][0], abs=2e-3), other[token][1]) == (logprob, rank)


_BASELINES: dict[bool, list[Any]] = {}


@pytest.fixture
def baseline(build: Build, devices: Devices) -> list[Any]:
    """Each request by itself, kernel by kernel, a step at a time."""
    if devices.interpreted not in _BASELINES:
        engine = build(enforce_eager=True)
        engine.core.executor.max_in_flight = 1
        _BASELINES[devices.interpreted] = alone(engine, requests())
    return _BASELINES[devices.interpreted]


WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "eager": {"enforce_eager": True},
    "in pieces": {"max_num_batched_tokens": 9},
    "blocks of 32": {"block_size": 32, "num_kv_blocks": 64},
    "preempted": {"block_size": 8, "num_kv_blocks": 17},
    "swapped": {"block_size": 8, "num_kv_blocks": 17, "swap_space": 0.01},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_whatever_runs_beside_it(build: Build, baseline: list[Any], devices: Devices, way: str) -> None:
    engine = build(**WAYS[way])
    assert engine.core.executor.max_in_flight == 2
    assert drain(engine, requests()) == baseline
    if way in ("preempted", "swapped"):
        assert engine.core.stats().num_preemptions_total, "nothing was preempted"
    if not HAS_GPU and "enforce_eager" not in WAYS[way]:
        stream: Any = devices.made[-1].stream
        assert stream.num_replayed > 3, "no step was a graph"
    for sampler in getattr(devices.made[-1], "samplers", ()):
        assert sampler.most_waiting == 2, "no step went ahead"


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["compiled" if HAS_GPU else "interpreted"], indirect=True)
def test_kernels_serve_an_engine(build: Build, devices: Devices) -> None:
    """A little of all that with Triton's kernels, also where they have to be interpreted."""
    asked = [
        (prompt[:9], msgspec.structs.replace(params, max_tokens=2, min_tokens=0)) for prompt, params in requests()[:4]
    ]
    few: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": len(asked)}
    with unrehearsed():
        engine = build(enforce_eager=True, **few)
    engine.core.executor.max_in_flight = 1
    assert drain(build(**few), asked) == alone(engine, asked)


@pytest.mark.parametrize("seed", [None, 1])
def test_log_probabilities_of_drawn_tokens_alone(build: Build, seed: int | None) -> None:
    """Nothing is selected or listed anywhere in these steps."""
    params = SamplingParams(temperature=0 if seed is None else 1, seed=seed, max_tokens=4, logprobs=0, ignore_eos=True)
    for output in drain(build(), [([5, 6, 7], params), ([8, 9], params)]):
        [(_, tokens, steps, _)] = output
        assert [[*step] for step in steps] == [[token] for token in tokens]


def test_the_last_block_of_the_longest_context_is_not_whole(build: Build) -> None:
    prompt = [(7 * i) % 190 + 3 for i in range(60)]
    asked = [(prompt, SamplingParams(temperature=0, max_tokens=65, ignore_eos=True))]
    [[(_, tokens, _, reason)]] = drain(build(max_model_len=125), asked)
    assert (len(tokens), reason) == (65, "length")


def test_prefixes_from_the_cache(build: Build, baseline: list[Any]) -> None:
    engine = build(enable_prefix_caching=True)
    assert drain(engine, requests()) == baseline
    hits = engine.stats().prefix_cache_hits_total
    assert drain(engine, requests()) == baseline
    assert engine.stats().prefix_cache_hits_total > hits, "no prefix was found"


def test_neighbours_that_need_the_host(build: Build, baseline: list[Any]) -> None:
    """Samples, beams, prompt logprobs and processors are drawn on the host, and change nothing for the others."""
    others = [
        (
            [7, 8, 9],
            SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=5, repetition_penalty=1.1, ignore_eos=True),
        ),
        ([9, 8, 7], SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)),
        ([5] * 4, SamplingParams(seed=6, max_tokens=4, ignore_eos=True, logits_processors=[lambda ids, row: row * 2])),
        ([6] * 4, SamplingParams(temperature=0, max_tokens=4, n=2, best_of=2, use_beam_search=True, ignore_eos=True)),
        ([4] * 4, SamplingParams(seed=7, max_tokens=4, ignore_eos=True, presence_penalty=0.5, bad_words=[])),
    ]
    engine = build()
    asked = requests()
    apart = alone(engine, others)
    together = drain(engine, [*others[:2], *asked, *others[2:]])
    assert together[2:-3] == baseline
    assert [*together[:2], *together[-3:]] == apart


def test_the_tokens_are_those_of_plain_torch(build: Build, baseline: list[Any]) -> None:
    """On the CPU, by other kernels: the same tokens, and logprobs within fp32's rounding."""
    assert_near(baseline, alone(build(device="cpu", kernels="torch"), requests()))


def test_requests_end_and_leave_while_a_step_is_ahead(build: Build, baseline: list[Any]) -> None:
    engine, asked = build(), requests()
    stopping = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[baseline[0][0][1][2]], ignore_eos=True)
    for i, (prompt, params) in enumerate([*asked, (asked[0][0], stopping)]):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    found: dict[str, Any] = {}
    for number in range(200):
        found |= {output.request_id: facts(output) for output in engine.step() if output.finished}
        if number == 3:
            engine.abort_request("1")
            engine.add_request("late", {"prompt_token_ids": asked[1][0]}, asked[1][1])
        if not engine.has_unfinished_requests():
            break
    assert found["late"] == baseline[1]
    assert [found[str(i)] for i in range(2, len(asked))] == baseline[2:]
    assert found[str(len(asked))][0][1] == baseline[0][0][1][: baseline[0][0][1].index(stopping.stop_token_ids[0]) + 1]


def test_a_step_that_is_interrupted_is_planned_again(build: Build, baseline: list[Any], monkeypatch: Any) -> None:
    engine = build()
    executor: Any = engine.core.executor
    collect, calls = executor.collect, []

    def interrupted(guide: Any = None) -> Any:
        calls.append(None)
        if len(calls) in (3, 6):
            raise KeyboardInterrupt
        return collect(guide)

    monkeypatch.setattr(executor, "collect", interrupted)
    for i, (prompt, params) in enumerate(requests()):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        try:
            found |= {output.request_id: facts(output) for output in engine.step() if output.finished}
        except KeyboardInterrupt:
            continue
    assert [found[str(i)] for i in range(len(baseline))] == baseline


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}])
def test_formats(build: Build, devices: Devices, options: dict[str, Any]) -> None:
    if "kv_cache_dtype" in options and not (HAS_GPU or devices.interpreted):
        pytest.skip("plain torch has no such cache")
    few = requests()[:3]
    assert drain(build(**options), few) == alone(build(**options, enforce_eager=True), few)


def test_without_triton_plain_torch_computes(build: Build) -> None:
    few = requests()[:3]
    engine = build(kernels="torch")
    assert engine.core.executor.max_in_flight == 1
    found, expected = drain(engine, few), drain(build(device="cpu", kernels="torch"), few)
    if HAS_GPU:
        assert_near(found, expected)  # cuBLAS sums in orders of its own
    else:
        assert found == expected


@pytest.mark.slow
def test_grammars(build: Build) -> None:
    """Masks come when the device has computed a step; who has none is drawn ahead before and after."""
    schema = {"type": "object", "properties": {"name": {"enum": ["a", "bc"]}, "n": {"type": "integer"}}}
    guided = SamplingParams(
        temperature=1.0, seed=4, max_tokens=20, structured_outputs=StructuredOutputsParams(json=schema)
    )
    penalized = SamplingParams(
        temperature=1.0, seed=5, max_tokens=12, repetition_penalty=1.2, structured_outputs=guided.structured_outputs
    )
    asked = [
        ([20, 30, 40], guided),
        ([25, 35], SamplingParams(temperature=1.0, seed=1, max_tokens=12)),
        ([21], penalized),
    ]
    options: dict[str, Any] = {"model": "demo", "load_format": "auto", "skip_tokenizer_init": False, "dtype": "float32"}
    found = drain(build(**options), asked)
    assert found == alone(build(**options, enforce_eager=True), asked)
    tokens = [one[0][1] for one in found]
    assert tokens == [one[0][1] for one in alone(build(**options, device="cpu", kernels="torch"), asked)]


@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_experts(build: Build, devices: Devices, tmp_path: Path, quantization: str | None) -> None:
    """Where the host asks how many rows each expert has, no step is a graph."""
    if devices.interpreted:
        pytest.skip("takes long, interpreted")
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    mixtral |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(TINY | mixtral))
    options: dict[str, Any] = {"model": str(tmp_path), "quantization": quantization}
    few = requests()[:3]
    assert drain(build(**options), few) == alone(build(**options, enforce_eager=True), few)
    if not HAS_GPU:
        stream: Any = devices.made[0].stream
        assert bool(stream.num_captured) == (quantization is None)


def test_vectors(devices: Devices) -> None:
    ids = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9] * 40, [8])]
    options: dict[str, Any] = {"model": "demo", "max_model_len": 64, "max_num_batched_tokens": 64, "num_kv_blocks": 16}
    ours = LLM(device="cuda", dtype="float32", **options).embed(ids, use_tqdm=False)
    theirs = LLM(device="cpu", kernels="torch", dtype="float32", **options).embed(ids, use_tqdm=False)
    for one, other in zip(ours, theirs, strict=True):
        assert one.outputs.embedding == pytest.approx(other.outputs.embedding, abs=1e-4)


def test_drafts(build: Build, baseline: list[Any]) -> None:
    """Steps with drafts are drawn on the host, a step at a time."""
    engine = build(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert engine.core.executor.max_in_flight == 1
    assert drain(engine, requests()) == baseline


@pytest.mark.parametrize(
    "model", ["demo-draft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("demo-medusa", "demo-eagle3"))]
)
def test_models_that_draft(devices: Devices, model: str) -> None:
    ids = [{"prompt_token_ids": ids} for ids in ([15, 26, 37], [19] * 20)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12)
    options: dict[str, Any] = {"model": "demo", "device": "cuda", "dtype": "float32", "num_kv_blocks": 64}
    options |= {"max_model_len": 128, "max_num_batched_tokens": 64}
    drafting, plain = LLM(speculative_config={"model": model}, **options), LLM(**options)
    found, expected = (
        [facts(one)[0][1] for one in llm.generate(ids, params, use_tqdm=False)] for llm in (drafting, plain)
    )
    assert found == expected


def test_adapters(devices: Devices) -> None:
    """Rows with adapters and without, in steps that are drawn ahead."""
    ids = [{"prompt_token_ids": ids} for ids in ([15, 26, 37], [19] * 20, [18, 30])]
    talk = LoRARequest("talk", 1, str(Path(quire.__file__).parent / "demo/adapters/talk"))
    voices = [talk, None, talk]
    options: dict[str, Any] = {"model": "demo", "enable_lora": True, "dtype": "float32", "max_model_len": 128}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=1)
    on_device = LLM(device="cuda", num_kv_blocks=32, max_num_batched_tokens=64, **options)
    on_cpu = LLM(device="cpu", kernels="torch", num_kv_blocks=32, **options)
    found, expected = (
        [facts(one)[0][1] for one in llm.generate(ids, params, use_tqdm=False, lora_request=voices)]
        for llm in (on_device, on_cpu)
    )
    assert found == expected
    plain = [facts(one)[0][1] for one in on_device.generate(ids, params, use_tqdm=False)]
    assert plain[1] == found[1]
    assert plain[0] != found[0], "the adapter changes nothing"
