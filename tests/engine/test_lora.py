"""Adapters end to end: those of merged weights within rounding, and the very bits whoever shares the batch."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loras import DEMO, TABLES, demo_adapters, factors, write_adapter
from safetensors.torch import load_file, save_file
from test_exactness import LateExecutor

import quire
from quire import LLM, AsyncLLM, AsyncOptions, LLMEngine, SamplingParams
from quire.config.engine_args import EngineArgs
from quire.engine.build import build_core, worker_config
from quire.engine.core import EngineCore
from quire.errors import ConfigError, InvalidRequestError
from quire.lora.request import LoRARequest
from quire.ops.native.library import TORCH, levels
from quire.ops.native.program import Program
from quire.outputs import RequestOutput
from quire.text.configured import config_tokenizer

DEMO_MODEL = Path(quire.__file__).parent / "demo"
ASKED = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, prompt_logprobs=1)
SEEDED = SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=2)
PROMPTS = ["Once upon a time there was a house", "The sea"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    tables = write_adapter(folder / "tables", factors(DEMO | TABLES, 5, 77), 5, use_rslora=True)
    return [*demo_adapters(folder, [4, 16, 7]), LoRARequest("tables", 4, str(tables))]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    found = LLM("demo", enable_lora=True, show_progress=False, debug=True)
    yield found
    found.llm_engine.shutdown()


def told(output: RequestOutput) -> tuple[Any, ...]:
    return output.prompt_logprobs, [(one.token_ids, one.logprobs) for one in output.outputs]


def run(llm: LLM, prompts: list[str], loras: list[LoRARequest | None], params: SamplingParams = ASKED) -> list[Any]:
    return [told(output) for output in llm.generate(prompts, params, use_tqdm=False, lora_request=loras)]


def merged(folder: Path, adapter: Path, scale: float) -> Path:
    """The demo with an adapter's matrices added to its weights."""
    folder.mkdir()
    for file in DEMO_MODEL.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    weights = {name: tensor.float() for name, tensor in load_file(DEMO_MODEL / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if "_A" in name:
            added = scale * (tensors[name.replace("_A", "_B")] @ a)
            module = name.removeprefix("base_model.model.").partition(".lora_")[0]
            weights[f"{module}.weight"] += added.t() if "embedding" in name else added
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kernels", sorted({levels()[0], TORCH}))
def test_it_is_the_model_with_merged_weights(kernels: str, adapters: list[LoRARequest], tmp_path: Path) -> None:
    options: Any = {"dtype": "float32", "kernels": kernels, "show_progress": False, "weight_cache": False}
    with_adapters = LLM("demo", enable_lora=True, **options)
    for adapter, scale in ((adapters[1], 2.0), (adapters[3], 2 * 5**0.5)):
        model = merged(tmp_path / adapter.lora_name, Path(adapter.lora_path), scale)
        expected = LLM(str(model), **options).generate(PROMPTS, ASKED, use_tqdm=False)
        found = with_adapters.generate(PROMPTS, ASKED, use_tqdm=False, lora_request=adapter)
        for one, other in zip(found, expected, strict=True):
            assert one.lora_request == adapter
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            for mine, theirs in zip(one.outputs[0].logprobs or [], other.outputs[0].logprobs or [], strict=True):
                for token in mine.keys() & theirs.keys():
                    assert abs(mine[token].logprob - theirs[token].logprob) < 2e-5


def test_no_neighbour_changes_a_bit(llm: LLM, adapters: list[LoRARequest]) -> None:
    each = [None, *adapters]
    for params in (ASKED, SEEDED):
        alone = [run(llm, PROMPTS[:1], [one], params)[0] for one in each]
        assert len({str(one) for one in alone}) == len(each)
        llm.reset_prefix_cache()
        assert run(llm, PROMPTS[:1] * 10, each * 2, params) == alone * 2
    plain = LLM("demo", show_progress=False)
    assert run(plain, PROMPTS[:1], [None], SEEDED) == alone[:1]


def test_an_adapter_is_replaced_in_place(llm: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    """Its id stands for what its files hold when that is asked for; whoever runs with it keeps what it began with."""
    prompts, alone = [PROMPTS[0] * 8], [run(llm, [PROMPTS[0] * 8], [one])[0] for one in adapters[:2]]
    shutil.copytree(adapters[0].lora_path, tmp_path / "own")
    plain, anew = (LoRARequest("own", 50, str(tmp_path / "own"), load_inplace=again) for again in (False, True))
    assert run(llm, prompts, [anew]) == run(llm, prompts, [plain]) == alone[:1]
    engine = llm.llm_engine
    engine.add_request("before", prompts[0], ASKED, lora_request=plain)
    engine.step()
    for file in Path(adapters[1].lora_path).iterdir():
        shutil.copy(file, tmp_path / "own")
    engine.add_request("between", prompts[0], ASKED, lora_request=plain)
    engine.add_request("after", prompts[0], ASKED, lora_request=anew)
    outputs = drain(engine)
    assert [told(outputs[name]) for name in ("before", "between", "after")] == [alone[0], *alone]
    assert outputs["after"].lora_request == plain
    assert run(llm, prompts, [plain]) == run(llm, prompts, [anew]) == alone[1:]
    shutil.copytree(adapters[0].lora_path, tmp_path / "other")
    moved = LoRARequest("own", 50, str(tmp_path / "other"), load_inplace=True)
    assert run(llm, prompts, [moved]) == alone[:1]
    with pytest.raises(InvalidRequestError, match="lora_int_id=50 stands for the adapter 'own'"):
        run(llm, prompts, [plain])
    with pytest.raises(InvalidRequestError, match="lora_request.load_inplace must be True or False; it is 5"):
        LoRARequest("own", 50, "x", load_inplace=5)  # type: ignore[arg-type]


@pytest.mark.skipif(levels()[0] == TORCH, reason="there are no programs")
def test_an_interrupt_leaves_no_adapter_behind(
    llm: LLM, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a step computes: whoever comes then without an adapter has none."""
    alone, compute = run(llm, PROMPTS[:1], [None]), Program.run

    def interrupted(program: Program, *arguments: Any) -> None:
        compute(program, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Program, "run", interrupted)
    llm.llm_engine.add_request("x", PROMPTS[0], ASKED, lora_request=adapters[0])
    with pytest.raises(KeyboardInterrupt):
        drain(llm.llm_engine)
    monkeypatch.undo()
    llm.llm_engine.abort_request("x")
    llm.reset_prefix_cache()
    assert run(llm, PROMPTS[:1], [None]) == alone


def test_a_prefix_is_shared_by_those_of_one_adapter_only(llm: LLM, adapters: list[LoRARequest]) -> None:
    prompt, params = " ".join(["The old house stood at the edge of the wood."] * 8), SamplingParams(max_tokens=1)
    llm.reset_prefix_cache()
    for one in (None, adapters[0], adapters[1]):
        first, again = (llm.generate(prompt, params, use_tqdm=False, lora_request=one)[0] for _ in range(2))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, (again.num_cached_tokens or 0) or 1)
        assert (again.num_cached_tokens or 0) >= 32


ENGINES: dict[str, dict[str, Any]] = {
    "few blocks": {"num_kv_blocks": 12, "block_size": 8, "max_model_len": 64},
    "small steps": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "two places": {"max_loras": 2, "max_cpu_loras": 2},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "heads": {"speculative_config": {"method": "medusa", "model": "demo-medusa"}},
    "eagle": {"speculative_config": {"method": "eagle3", "model": "demo-eagle3"}},
    "a draft model": {"speculative_config": {"model": "demo-draft", "num_speculative_tokens": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_it_is_so_in_every_engine(name: str, adapters: list[LoRARequest]) -> None:
    """Preempted, in chunks, with drafts, waiting for a place, on quantized weights."""
    options = ENGINES[name]
    base: Any = {key: value for key, value in options.items() if key == "quantization"}
    loras, prompts = [*adapters, None] * 2, (PROMPTS * 5)[:10]
    plain = LLM("demo", enable_lora=True, show_progress=False, enable_prefix_caching=False, **base)
    expected = [run(plain, [prompt], [lora])[0] for prompt, lora in zip(prompts, loras, strict=True)]
    mixed = LLM("demo", enable_lora=True, show_progress=False, debug=True, **options)
    assert run(mixed, prompts, loras) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2, "tp_collective": "reduce"},
    ],
    ids=str,
)
def test_ranks_and_engines_share_an_adapter(options: dict[str, Any], adapters: list[LoRARequest]) -> None:
    check_adapters(options, adapters)


def check_adapters(options: dict[str, Any], adapters: list[LoRARequest]) -> None:
    """Answers with adapters are those of one process."""
    loras, prompts = [*adapters, None], ["Once upon a time"] * 5
    dtype: Any = {"dtype": "float32" if "tp_collective" in options else "auto"}  # where sums are others
    whole = LLM("demo", enable_lora=True, show_progress=False, **dtype)
    shared = LLM("demo", enable_lora=True, show_progress=False, num_kv_blocks=64, **dtype, **options)
    try:
        found, expected = run(shared, prompts, loras), run(whole, prompts, loras)
        if "tp_collective" in options:
            assert [one[1][0][0] for one in found] == [one[1][0][0] for one in expected]
        else:
            assert found == expected
    finally:
        shared.llm_engine.shutdown()


def test_a_bad_adapter_hurts_nobody(llm: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    def adapter(number: int, tensors: dict[str, torch.Tensor], **config: Any) -> LoRARequest:
        return LoRARequest(f"bad-{number}", number, str(write_adapter(tmp_path / str(number), tensors, 4, **config)))

    name = "model.layers.0.self_attn.q_proj"
    other = adapter(101, factors({name: (512, 512)}, 4, 1))
    with pytest.raises(InvalidRequestError, match=r"bad-101.*lora_A.weight' and its B are \[4, 512\].*another base"):
        llm.generate("x", ASKED, use_tqdm=False, lora_request=other)
    unknown = adapter(102, factors({"model.layers.9.self_attn.q_proj": (256, 256)}, 4, 1))
    with pytest.raises(
        InvalidRequestError, match=r"model\.layers\.9\.self_attn\.q_proj', which is no layer that adapters"
    ):
        llm.generate("x", ASKED, use_tqdm=False, lora_request=unknown)
    broken = factors({name: (256, 256)}, 4, 1)
    broken[f"base_model.model.{name}.lora_B.weight"][3, 1] = float("nan")
    with pytest.raises(InvalidRequestError, match=r"lora_B\.weight' that are not finite"):
        llm.generate("x", ASKED, use_tqdm=False, lora_request=adapter(103, broken))
    endless = adapter(105, factors({name: (256, 256)}, 4, 1), lora_alpha=10**400)
    with pytest.raises(InvalidRequestError, match=r"the adapter 'bad-105' can't be used: OverflowError"):
        llm.generate("x", ASKED, use_tqdm=False, lora_request=endless)
    run(llm, ["x"], [adapters[0]])
    with pytest.raises(InvalidRequestError, match=r"lora_int_id=1 stands for the adapter 'voice-1'"):
        llm.generate("x", ASKED, use_tqdm=False, lora_request=LoRARequest("other", 1, adapters[1].lora_path))
    engine = llm.llm_engine
    engine.add_request("good", "Once", SEEDED, lora_request=adapters[2])
    engine.add_request("bad", "Once", SEEDED, lora_request=adapter(104, factors({name: (8, 8)}, 4, 1)))
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert done["bad"].outputs[0].finish_reason == "error"
    assert [told(done["good"])] == run(llm, ["Once"], [adapters[2]], SEEDED)


def test_factors_of_eight_bits_are_their_numbers(llm: LLM, tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in factors(DEMO, 4, 1).items()}
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    both: list[LoRARequest | None] = [
        LoRARequest(name, number, str(write_adapter(tmp_path / name, own, 4)))
        for number, (name, own) in enumerate({"narrow": tensors, "wide": wide}.items(), 110)
    ]
    assert run(llm, ["Once"], both[:1]) == run(llm, ["Once"], both[1:]) != run(llm, ["Once"], [None])


def test_what_sees_is_not_run(llm: LLM, tmp_path: Path) -> None:
    """Adapters of models that see have factors for that, too, where they are for all linear layers."""
    own = factors(DEMO, 4, 1)
    sight = factors({"model.visual.blocks.0.attn.qkv": (96, 32), "visual.merger.mlp.0": (64, 64)}, 4, 2)
    both: list[LoRARequest | None] = [
        LoRARequest(name, number, str(write_adapter(tmp_path / name, tensors, 4)))
        for number, (name, tensors) in enumerate({"blind": own, "sees": own | sight}.items(), 120)
    ]
    assert run(llm, ["Once"], both[:1]) == run(llm, ["Once"], both[1:]) != run(llm, ["Once"], [None])


def drain(engine: LLMEngine) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    for _ in range(1000):  # loading takes some of them
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if not engine.has_unfinished_requests():
            break
    return done


def test_an_id_may_be_used_again_with_another_adapter(adapters: list[LoRARequest]) -> None:
    """There is one place, and a request that has ended keeps it from nobody, whoever has its id now."""
    llm = LLM("demo", enable_lora=True, max_loras=1, num_kv_blocks=64, show_progress=False, debug=True)
    expected = [told(output) for lora in adapters[:2] for output in llm.generate("Once", ASKED, lora_request=lora)]
    engine = llm.llm_engine
    for lora, one in zip(adapters[:2], expected, strict=True):
        engine.add_request("x", "Once", ASKED, lora_request=lora)
        assert [told(output) for output in drain(engine).values()] == [one]
    engine.add_request("x", "Once", ASKED, lora_request=adapters[0])
    engine.abort_request("x")  # while it waits for its adapter
    engine.step()
    engine.add_request("x", "Once", ASKED)
    assert [told(output) for output in drain(engine).values()] == run(llm, ["Once"], [None])


def test_requests_that_have_ended_are_forgotten(llm: LLM, adapters: list[LoRARequest]) -> None:
    """A server's adapters may stay in their places for months."""
    for _ in range(5):
        run(llm, PROMPTS, [adapters[0]] * 2, SamplingParams(max_tokens=1))
    core = llm.llm_engine.core
    assert isinstance(core, EngineCore)
    assert all(len(users) <= 2 for users in core.places._users.values())


def test_a_place_may_change_hands_while_a_plan_of_its_last_request_is_in_flight(adapters: list[LoRARequest]) -> None:
    """As a pipeline of four stages has plans: those of a request that has ended are computed, for nobody."""

    class Stages(LateExecutor):
        max_in_flight = 4

    options: Any = {"model": "demo", "enable_lora": True, "max_loras": 1, "num_kv_blocks": 64, "debug": True}
    config = EngineArgs(**options, max_num_batched_tokens=8, enable_prefix_caching=False).resolve()
    core = build_core(config, show_progress=False, executor=Stages(worker_config(config)))
    engine = LLMEngine(config, core, config_tokenizer(config))
    alone: list[Any] = []
    for lora in adapters[:2]:
        engine.add_request(lora.lora_name, "Once", ASKED, lora_request=lora)
        alone.append(told(drain(engine)[lora.lora_name]))
    engine.add_request("long", {"prompt_token_ids": [5, 6, 7, 8] * 20}, ASKED, lora_request=adapters[0])
    while not core.first_scheduled:
        engine.step()
    engine.abort_request("long")
    engine.add_request("next", "Once", ASKED, lora_request=adapters[1])
    assert told(drain(engine)["next"]) == alone[1]
    engine.shutdown()


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="max_cpu_loras=2 is below max_loras=8"):
        EngineArgs(max_cpu_loras=2)
    with pytest.raises(ConfigError, match="max_lora_rank must be an integer, from 1 to 256, got 257"):
        EngineArgs(max_lora_rank=257)


def test_an_engine_without_adapters_says_so(adapters: list[LoRARequest]) -> None:
    plain = LLM("demo", show_progress=False)
    with pytest.raises(InvalidRequestError, match="enable_lora=True"):
        plain.generate("x", ASKED, lora_request=adapters[0])
    with pytest.raises(InvalidRequestError, match=r"must be a LoRARequest or a PromptAdapterRequest; it is '"):
        plain.generate("x", ASKED, lora_request=["voice"])  # type: ignore[list-item]


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_an_adapter_is_taken_in_a_pause(mode: str, adapters: list[LoRARequest], tmp_path: Path) -> None:
    engine = AsyncLLM.from_engine_args(
        EngineArgs("demo", enable_lora=True, debug=True), options=AsyncOptions(engine="thread")
    )

    async def check() -> None:
        running = engine.generate("Once", SamplingParams(max_tokens=100, ignore_eos=True))
        await anext(running)
        await engine.pause_generation(mode=mode)
        assert await asyncio.wait_for(engine.add_lora(adapters[0]), 10)
        with pytest.raises(InvalidRequestError, match="nowhere"):
            await asyncio.wait_for(engine.add_lora(LoRARequest("nowhere", 9, str(tmp_path / "nowhere"))), 10)
        await engine.resume_generation()
        *_, last = [output async for output in engine.generate("Once", ASKED, lora_request=adapters[0])]
        assert told(last) == run(LLM("demo", enable_lora=True), ["Once"], [adapters[0]])[0]
        *_, last = [output async for output in running]
        assert last.outputs[0].finish_reason == ("abort" if mode == "abort" else "length")

    asyncio.run(check())
    engine.shutdown()
