"""Virtual tokens before prompts, end to end: transformers' logits for the same embeddings, and the very bits whoever
shares the batch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loras import demo_adapters, demo_prompts, write_virtual
from safetensors.torch import load_file

import quire
from quire import LLM, LoRARequest, PromptAdapterRequest, SamplingParams
from quire.errors import InvalidRequestError
from quire.ops.native.library import TORCH, levels
from quire.outputs import RequestOutput

DEMO_MODEL = Path(quire.__file__).parent / "demo"
ASKED = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, prompt_logprobs=1)
SEEDED = SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=2, repetition_penalty=1.2)
PROMPTS = ["Once upon a time there was a house", "The sea"]
TAKES: Any = {"enable_prompt_adapter": True, "show_progress": False}
Some = list[PromptAdapterRequest | None]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[PromptAdapterRequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [*demo_prompts(folder, [1, 8, 21]), *demo_prompts(folder, [3, 39], 60, prefix=True)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    found = LLM("demo", enable_lora=True, debug=True, **TAKES)
    yield found
    found.llm_engine.shutdown()


def told(output: RequestOutput) -> tuple[Any, ...]:
    parts = [(one.token_ids, one.text, one.logprobs) for one in output.outputs]
    return output.prompt_token_ids, output.prompt_logprobs, parts


def run(llm: LLM, prompts: list[str], each: Some, params: SamplingParams = ASKED) -> list[Any]:
    return [told(found) for found in llm.generate(prompts, params, use_tqdm=False, prompt_adapter_request=each)]


def rows_of(adapter: PromptAdapterRequest) -> torch.Tensor:
    return load_file(Path(adapter.prompt_adapter_local_path) / "adapter_model.safetensors")["prompt_embeddings"]


@pytest.mark.parametrize("kernels", sorted({levels()[0], TORCH}))
def test_it_is_transformers_with_these_embeddings(kernels: str, adapters: list[PromptAdapterRequest]) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    llm = LLM("demo", dtype="float32", kernels=kernels, weight_cache=False, **TAKES)
    for adapter in adapters:
        (found,) = llm.generate(PROMPTS[:1], ASKED, use_tqdm=False, prompt_adapter_request=adapter)
        tokens, num_virtual = found.prompt_token_ids, adapter.prompt_adapter_num_virtual_tokens
        assert tokens == llm.get_tokenizer().encode(PROMPTS[0])
        ids = torch.tensor([[*tokens, *found.outputs[0].token_ids]])
        rows, embedded, past = rows_of(adapter), model.get_input_embeddings()(ids), None
        if rows.shape[1] == 256:
            embedded = torch.cat([rows[None], embedded], 1)
        else:  # layers' keys and values, of 2 heads of 64
            past = transformers.DynamicCache()
            for layer, (keys, values) in enumerate(rows.view(-1, 5, 2, 2, 64).permute(1, 2, 3, 0, 4)):
                past.update(keys[None], values[None], layer)
        with torch.no_grad():
            logits = model(inputs_embeds=embedded, past_key_values=past).logits[0].log_softmax(-1)
        logits = logits[-ids.shape[1] :]
        assert logits.shape[0] == ids.shape[1]
        assert num_virtual == len(rows)
        for place, expected in enumerate(logits[:-1], 1):
            listed = (found.prompt_logprobs or []) + (found.outputs[0].logprobs or [])
            for token, one in (listed[place] or {}).items():
                assert abs(one.logprob - float(expected[token])) < 1e-4
        assert (found.prompt_logprobs or [0])[0] is None


def test_it_is_peft_with_its_own_files(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    configs = {
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6),
        "projected": peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=32
        ),
        "p": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=7, encoder_hidden_size=32),
    }
    llm = LLM("demo", dtype="float32", weight_cache=False, **TAKES)
    for own, (name, config) in enumerate(configs.items(), 1):
        torch.manual_seed(own)
        base = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
        model = peft.get_peft_model(base, config).eval()
        model.save_pretrained(tmp_path / name)
        request = PromptAdapterRequest(name, own, str(tmp_path / name), config.num_virtual_tokens)
        (found,) = llm.generate(PROMPTS[:1], ASKED, use_tqdm=False, prompt_adapter_request=request)
        ids = torch.tensor([found.prompt_token_ids])
        made = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
        assert found.outputs[0].token_ids == made[0, ids.shape[1] :].tolist()


def test_no_neighbour_changes_a_bit(llm: LLM, adapters: list[PromptAdapterRequest], tmp_path: Path) -> None:
    each: Some = [None, *adapters]
    for params in (ASKED, SEEDED):
        alone = [run(llm, PROMPTS[:1], [one], params)[0] for one in each]
        assert len({str(one) for one in alone}) == len(each)
        llm.reset_prefix_cache()
        assert run(llm, PROMPTS[:1] * 12, each * 2, params) == alone * 2
    (lora,) = demo_adapters(tmp_path, [4])
    (of_lora,) = llm.generate(PROMPTS[0], SEEDED, use_tqdm=False, lora_request=lora)
    both = llm.generate(
        [PROMPTS[0]] * 3,
        SEEDED,
        use_tqdm=False,
        lora_request=[lora, None, None],
        prompt_adapter_request=[None, adapters[1], None],
    )
    assert [told(one) for one in both] == [told(of_lora), alone[2], alone[0]]
    assert [one.lora_request for one in both] == [lora, None, None]
    plain = LLM("demo", show_progress=False)
    assert run(plain, PROMPTS[:1], [None], SEEDED) == alone[:1]


def test_samples_and_beams_share_virtual_tokens(llm: LLM, adapters: list[PromptAdapterRequest]) -> None:
    three = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=1)
    (many,) = run(llm, PROMPTS[:1], [adapters[1]], three)
    llm.reset_prefix_cache()
    assert run(llm, PROMPTS[:1], [adapters[1]], three) == [many]
    assert len({str(one) for one in many[2]}) == 3


def test_a_prefix_is_shared_by_those_of_one_adapter_only(llm: LLM, adapters: list[PromptAdapterRequest]) -> None:
    prompt = " ".join(["The old house stood at the edge of the wood."] * 8)
    for one in (None, adapters[0], adapters[2], adapters[4]):
        llm.reset_prefix_cache()
        llm.generate([prompt], SEEDED, use_tqdm=False, prompt_adapter_request=adapters[1])
        first, again = (llm.generate(prompt, SEEDED, use_tqdm=False, prompt_adapter_request=one)[0] for _ in range(2))
        assert first.num_cached_tokens == 0
        assert (again.num_cached_tokens or 0) >= 16
        assert told(first) == told(again)
        assert (again.num_cached_tokens or 0) < len(again.prompt_token_ids)


def test_what_a_penalty_counts_is_the_users_prompt(llm: LLM, tmp_path: Path) -> None:
    """With the rows of the tokens themselves before it, a prompt is the longer prompt, but not for penalties."""
    tokens = llm.get_tokenizer().encode("The king and the queen went out. The king")
    table = load_file(DEMO_MODEL / "model.safetensors")["model.embed_tokens.weight"]
    rows = table[tokens[:5]].float()
    adapter = PromptAdapterRequest("same", 90, str(write_virtual(tmp_path / "same", rows)), 5)
    for penalty in (1.0, 1.4):
        params = SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=penalty)
        (short,) = llm.generate([{"prompt_token_ids": tokens[5:]}], params, prompt_adapter_request=adapter)
        (long,) = llm.generate([{"prompt_token_ids": tokens}], params)
        assert (short.outputs[0].token_ids == long.outputs[0].token_ids) == (penalty == 1.0)


ENGINES: dict[str, dict[str, Any]] = {
    "few blocks": {"num_kv_blocks": 20, "block_size": 8, "max_model_len": 80},
    "swapped": {"num_kv_blocks": 20, "block_size": 8, "max_model_len": 80, "swap_space": 0.01},
    "small steps": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "two places": {"max_prompt_adapters": 2, "max_cpu_loras": 2, "max_loras": 1},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "torch": {"kernels": "torch"},
    "heads": {"speculative_config": {"method": "medusa", "model": "demo-medusa"}},
    "eagle": {"speculative_config": {"method": "eagle3", "model": "demo-eagle3"}},
    "a draft model": {"speculative_config": {"model": "demo-draft", "num_speculative_tokens": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_it_is_so_in_every_engine(name: str, adapters: list[PromptAdapterRequest]) -> None:
    """Preempted, in chunks, with drafts, waiting for a place, on quantized weights."""
    options = ENGINES[name]
    base: Any = {key: options[key] for key in options.keys() & {"quantization", "kv_cache_dtype", "kernels"}}
    each, prompts = [*adapters, None] * 2, (PROMPTS * 6)[:12]
    plain = LLM("demo", enable_prefix_caching=False, **TAKES, **base)
    expected = [run(plain, [prompt], [one])[0] for prompt, one in zip(prompts, each, strict=True)]
    mixed = LLM("demo", debug=True, **TAKES, **options)
    assert run(mixed, prompts, each) == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_share_an_adapter(options: dict[str, Any], adapters: list[PromptAdapterRequest]) -> None:
    each, prompts = [*adapters, None], ["Once upon a time"] * 6
    expected = run(LLM("demo", **TAKES), prompts, each)
    shared = LLM("demo", **TAKES, **options)
    try:
        assert run(shared, prompts, each) == expected
    finally:
        shared.llm_engine.shutdown()


def test_what_is_refused_is_named(llm: LLM, adapters: list[PromptAdapterRequest], tmp_path: Path) -> None:
    def refused(match: str, request: Any, prompt: Any = "x", **others: Any) -> None:
        with pytest.raises(InvalidRequestError, match=match) as error:
            llm.generate([prompt], ASKED, use_tqdm=False, prompt_adapter_request=request, **others)
        assert error.value.param == ("prompt_adapter_request" if prompt == "x" else "prompt")

    def adapter(own: int, rows: torch.Tensor, **stated: Any) -> PromptAdapterRequest:
        return PromptAdapterRequest(
            f"bad-{own}", own, str(write_virtual(tmp_path / str(own), rows, **stated)), len(rows)
        )

    good = torch.zeros(4, 256)
    refused(
        r"bad-101.*\[4, 512\], and this model's are 256 wide: .*another base",
        adapter(101, torch.zeros(4, 512)),
    )
    refused("bad-102.*129 virtual tokens, over max_prompt_adapter_token=128", adapter(102, torch.zeros(129, 256)))
    refused(r"bad-103.*must have 'prompt_embeddings' \[5, width\]", adapter(103, good, num_virtual_tokens=5))
    refused("bad-104.*not finite", adapter(104, good / 0))
    refused("bad-105.*peft_type 'IA3'", adapter(105, good, peft_type="IA3"))
    given = adapter(106, good)
    refused("has 4 virtual tokens.*and 3 by what", PromptAdapterRequest("x", 107, given.prompt_adapter_local_path, 3))
    run(llm, ["x"], [adapters[0]])
    refused("prompt_adapter_id=50 stands for the adapter 'mood-50'", PromptAdapterRequest("x", 50, str(tmp_path), 4))
    lora = LoRARequest("l", 50, adapters[0].prompt_adapter_local_path)
    prefix = adapter(110, torch.zeros(4, 640), kind="PREFIX_TUNING")
    refused(r"bad-110.*\[4, 640\], and this model's are 1280 wide: .*another base", prefix)
    for own, match in ((50, "lora_int_id=50 stands for"), (109, "has 1 virtual tokens .*and 0 by what")):
        with pytest.raises(InvalidRequestError, match=match) as error:
            llm.generate("x", ASKED, lora_request=LoRARequest("l", own, lora.lora_path))
        assert error.value.param == "lora_request"
    refused("a LoRA or with a prompt adapter", adapters[0], lora_request=lora)
    refused("must be a LoRARequest or a PromptAdapterRequest; it is '", ["mood"])
    most = llm.llm_engine.config.model.max_model_len
    refused(f"{most - 2 + 8}", adapters[1], {"prompt_token_ids": [5] * (most - 2)})
    path = Path(adapter(108, good).prompt_adapter_local_path)
    whole = (path / "adapter_model.safetensors").read_bytes()
    (path / "adapter_model.safetensors").write_bytes(whole[:-9])
    refused("truncated or damaged", PromptAdapterRequest("x", 108, str(path), 4))
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    refused("is a pickle", PromptAdapterRequest("x", 108, str(path), 4))
    config = json.loads((path / "adapter_config.json").read_text())
    assert config["num_virtual_tokens"] == 4
    assert run(llm, ["x"], [adapters[0]]) != run(llm, ["x"], [None])


def test_an_engine_without_says_so(adapters: list[PromptAdapterRequest]) -> None:
    plain = LLM("demo", show_progress=False, enable_lora=True)
    with pytest.raises(InvalidRequestError, match="enable_prompt_adapter=True"):
        plain.generate("x", ASKED, prompt_adapter_request=adapters[0])


@pytest.mark.parametrize("wrong", [("", 1, "p", 4), ("n", 0, "p", 4), ("n", 1, "", 4), ("n", 1, "p", 0)], ids=str)
def test_requests_that_name_no_adapter(wrong: tuple[Any, Any, Any, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="^prompt_adapter_"):
        PromptAdapterRequest(*wrong)


def test_the_demo_has_three_voices(llm: LLM) -> None:
    folder = DEMO_MODEL / "adapters"
    assert all(sum(file.stat().st_size for file in path.iterdir()) < 300_000 for path in folder.iterdir())
    loras = [LoRARequest(name, own, str(folder / name)) for own, name in enumerate(("play", "talk"), 201)]
    outputs = llm.generate(
        ["The king"] * 4,
        SEEDED,
        use_tqdm=False,
        lora_request=[*loras, None, None],
        prompt_adapter_request=[None, None, PromptAdapterRequest("sea", 203, str(folder / "sea"), 20), None],
    )
    assert len({output.outputs[0].text for output in outputs}) == 4
