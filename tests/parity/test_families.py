"""What is built on top of models, with each family whose weights or blocks are laid out in a way of its own.

Adapters against transformers with merged weights, or with the same keys and values before a prompt; quantized weights
and ranks by greedy decoding of a whole engine.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, PromptAdapterRequest, SamplingParams
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.settings import number
from quire.ops.native.library import TORCH

transformers = pytest.importorskip("transformers")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
tiny: Any = importlib.import_module("tiny_models")
loras: Any = importlib.import_module("loras")

NAMES = ["olmo2", "glm4", "ernie4.5-biases", "exaone4", "cohere2", "arcee", "starcoder2", "olmoe", "granitemoe"]
NAMES += ["granitehybrid", "helium", "ministral3", "glm4-moe", "ernie4.5-moe"]
PROMPT = [5, 9, 33, 7, 21, 60, 8, 96, 0, 1, 17, 50, 51, 52, 4, 88, 91, 12, 12, 30]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3, detokenize=False)
Serve = Callable[..., LLM]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[LLM] = []

    def start(directory: Path, **options: Any) -> LLM:
        fixed = {"skip_tokenizer_init": True, "show_progress": False, "max_model_len": 128, "weight_cache": False}
        made.append(LLM(str(directory), **fixed, **options))
        return made[-1]

    yield start
    for llm in made:
        llm.llm_engine.shutdown()


def answer(llm: LLM, **adapter: Any) -> tuple[list[int], list[float]]:
    """Greedy tokens, and the log-probability of each."""
    [found] = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False, **adapter)
    tokens = found.outputs[0].token_ids
    listed = zip(tokens, found.outputs[0].logprobs or [], strict=True)
    return tokens, [one[token].logprob for token, one in listed]


@torch.inference_mode()
def check(answered: tuple[list[int], list[float]], theirs: Any, **given: Any) -> None:
    tokens, logprobs = answered
    logits = theirs(torch.tensor([PROMPT + tokens]), **given).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert tokens == logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logprobs), logits.max(-1).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", [TORCH, "native"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_adapters(name: str, kernels: str, tmp_path: Path, serve: Serve) -> None:
    theirs = tiny.build_theirs(name)
    directory = tiny.save(theirs, tmp_path / "model")
    llm = serve(directory, dtype="float32", kernels=kernels, enable_lora=True, enable_prompt_adapter=True)
    check(answer(llm), theirs)
    config, layers = theirs.config, theirs.config.num_hidden_layers
    heads, dim = config.num_key_value_heads, theirs.model.layers[0].self_attn.head_dim
    rows = torch.randn(6, layers, 2, heads, dim)
    path = loras.write_virtual(tmp_path / "prefix", rows.flatten(1), "PREFIX_TUNING")
    past = transformers.DynamicCache()
    for layer, (keys, values) in enumerate(rows.permute(1, 2, 3, 0, 4)):
        past.update(keys[None], values[None], layer)
    found = answer(llm, prompt_adapter_request=PromptAdapterRequest("prefix", 2, str(path), len(rows)))
    check(found, theirs, past_key_values=past)
    changes = [(n, m) for n, m in theirs.named_modules() if isinstance(m, torch.nn.Linear) or n.endswith(".mlp.gate")]
    linears = {name: module for name, module in changes if ".layers." in name}
    factors = loras.factors({n: tuple(m.weight.shape) for n, m in linears.items()}, 3, 1, 0.3)
    path = loras.write_adapter(tmp_path / "lora", factors, 3)
    for module, linear in linears.items():
        a, b = (factors[f"base_model.model.{module}.lora_{end}.weight"] for end in "AB")
        linear.weight += 2.0 * b @ a
    check(answer(llm, lora_request=LoRARequest("lora", 1, str(path))), theirs)


@pytest.mark.parametrize(
    ("name", "extra"),
    [("glm4-moe", "model.layers.3.eh_proj.weight"), ("ernie4.5-moe", "model.mtp_block.0.mlp.up_proj.weight")],
)
def test_layers_that_draft_are_left_out(name: str, extra: str, tmp_path: Path) -> None:
    file = tiny.save(tiny.build_theirs(name), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {extra: torch.zeros(4, 4)}, file, {"format": "pt"})
    tiny.build_ours(tmp_path)
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(4, 4)}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.2\.eh_proj\.weight', for which this model"):
        tiny.build_ours(tmp_path)


@pytest.mark.parametrize("quantization", ["int8", "w8a8", "int4", "w4a8"])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_weights(name: str, native: str, quantization: str, tmp_path: Path, serve: Serve) -> None:
    """As near as torch comes with the same weights.

    In a mixture but for one token: where two experts are about as good, rounding chooses.
    """
    directory = tiny.save(tiny.build_theirs(name), tmp_path)
    exact = tiny.Paged(tiny.build_ours(directory, max_model_len=128)).prefill(0, PROMPT)
    errors = []
    for kernels in (native, TORCH):
        ours = tiny.build_ours(directory, "bfloat16", kernels, quantization=quantization, max_model_len=128)
        squares = (tiny.Paged(ours).prefill(0, PROMPT).float() - exact).square().mean(-1)
        if kernels == native and name in tiny.WITH_EXPERTS:
            squares = squares.sort().values[:-1]
        errors.append(squares.mean().sqrt() / exact.std())
    assert errors[0] < 1.3 * errors[1] + 0.02


@pytest.mark.parametrize(
    "family", ["Arcee", "Ernie4_5", "Starcoder2", "Qwen3VLMoeText", "Olmoe", "GraniteMoe", "Qwen3Moe", "Helium"]
)
def test_what_is_absent_means_what_transformers_means(family: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, f"{family}Config")()
    theirs.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    kept = ("model_type", "max_position_embeddings", *sizes)
    (tmp_path / "config.json").write_text(json.dumps({key: stated[key] for key in kept}))
    ours = ModelConfig.from_pretrained(tmp_path)
    tied = theirs.tie_word_embeddings and family != "Qwen3VLMoeText"  # of which the whole says it
    found = (ours.num_kv_heads, ours.head_dim, ours.tie_word_embeddings, ours.rope_parameters["rope_theta"])
    dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    theta = theirs.rope_parameters["rope_theta"]
    assert found == (theirs.num_key_value_heads, dim, tied, theta)
    assert set(ours.layer_windows) == {None}
    numbers = ("rms_norm_eps", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
    defaults = {"rms_norm_eps": 1e-6, "decoder_sparse_step": 1}
    for key in (key for key in numbers if hasattr(theirs, key)):
        assert number(ours, key, defaults.get(key, 0)) == getattr(theirs, key), key


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_surroundings_change_no_bit(name: str, native: str, tmp_path: Path, serve: Serve) -> None:
    theirs = tiny.build_theirs(name)
    directory = tiny.save(theirs, tmp_path)
    expected = answer(serve(directory, dtype="bfloat16"))
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    ways: list[dict[str, Any]] = [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"speculative_config": ngram, "max_num_batched_tokens": 5, "block_size": 8},
    ]
    if name in tiny.WITH_EXPERTS:
        ways.append({"tensor_parallel_size": 2, "enable_expert_parallel": True})
    if not getattr(theirs.config, "sliding_window", None):  # drafts for itself
        ways.append({"speculative_config": {"model": str(directory), "num_speculative_tokens": 3}})
    for options in ways:
        assert answer(serve(directory, dtype="bfloat16", **options)) == expected, options
