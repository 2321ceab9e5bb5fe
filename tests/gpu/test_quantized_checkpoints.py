"""Quantized checkpoints on a GPU keep their codes in its memory, and answer as the dequantized model does."""

import importlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.quantization.coded import Coded
from tests.gpu.conftest import HAS_GPU, TINY, Devices, unrehearsed

sys.path.insert(0, str(Path(__file__).parents[1]))
files: Any = importlib.import_module("quantized_files")
Write = Callable[..., tuple[Path, Path]]  # of a case and what is left plain -> quantized, dequantized
PROMPTS = [{"prompt_token_ids": ids} for ids in ([15, 26, 37], [19] * 40, [18, 30, 5, 6])]
KEPT = ["gptq-4", "gptq-4-row", "gptq-8", "awq-gemm", "awq-gemm-sym", "ct-w4-zeros", "ct-w8", "ct-int8"]
KEPT += ["fp8-tensor", "fp8-channel", "fp8-block"]
_QUICK = ("gptq-4", "ct-int8", "fp8-block")  # a kind of codes each
DEQUANTIZED = ["gptq-4-order", "gptq-odd", "bnb-nf4"]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a small model of random weights in the format of a case, and what that stands for."""
    source = tmp_path / "source"
    source.mkdir()
    config = TINY | {"hidden_size": 128, "intermediate_size": 352, "tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    shapes = {"self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128)}
    shapes |= {"self_attn.o_proj": (128, 128), "mlp.gate_proj": (352, 128), "mlp.up_proj": (352, 128)}
    shapes |= {"mlp.down_proj": (128, 352), "input_layernorm": (128,), "post_attention_layernorm": (128,)}
    named = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    named |= {"model.embed_tokens.weight": (199, 128), "model.norm.weight": (128,)}
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in named.items()}
    save_file(tensors, source / "model.safetensors")

    def make(case: str, ignored: tuple[str, ...] = ()) -> tuple[Path, Path]:
        values = files.write(tmp_path / "quantized", *files.CASES[case], ignored, source=source)
        files.write_values(tmp_path / "plain", values, torch.bfloat16, source=source)
        return tmp_path / "quantized", tmp_path / "plain"

    return make


def load(path: Path, **options: Any) -> LLM:
    given = {"max_model_len": 64, "max_num_batched_tokens": 32, "num_kv_blocks": 32, "dtype": "bfloat16", **options}
    return LLM(str(path), device="cuda", skip_tokenizer_init=True, **given)


def answers(llm: LLM, prompts: Any = PROMPTS, max_tokens: int = 6) -> list[Any]:
    """Tokens and logprobs."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=2, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(out.outputs[0].token_ids), out.outputs[0].logprobs) for out in outputs]


def linears(llm: LLM) -> list[Any]:
    worker: Any = llm.llm_engine.core.executor
    return [module for module in worker.worker.model.modules() if "_proj" in getattr(module, "name", "")]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in _QUICK else pytest.mark.slow) for case in KEPT]
)
def test_codes_are_kept(write: Write, devices: Devices, case: str) -> None:
    quantized, plain = map(load, write(case))
    found = answers(quantized)
    assert found == answers(plain)
    assert [answers(quantized, [prompt])[0] for prompt in PROMPTS] == found, "whoever shares a batch"
    layers, others = linears(quantized), linears(plain)
    assert layers
    assert all(isinstance(layer.method, Coded) for layer in layers)
    taken, all_bits = (sum(each.nbytes for one in some for each in one.parameters()) for some in (layers, others))
    assert taken < all_bits * (0.34 if case.startswith(("gptq-4", "awq", "ct-w4")) else 0.6)


@pytest.mark.parametrize("case", DEQUANTIZED)
def test_what_is_dequantized_is_said(
    write: Write, devices: Devices, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = write(case)
    with caplog.at_level(logging.INFO):
        llm = load(quantized)
    assert "14 matrices can't be kept in blocks here and are dequantized (model.layers." in caplog.text
    assert answers(llm) == answers(load(plain))


def test_parts_of_several_types_are_one_plain_matrix(write: Write, devices: Devices) -> None:
    """Queries are plain; what is merged with nothing else keeps its codes."""
    quantized, plain = map(load, write("ct-w4", ("q_proj",)))
    assert answers(quantized) == answers(plain)
    kept = {layer.name.rpartition(".")[2]: isinstance(layer.method, Coded) for layer in linears(quantized)}
    assert kept == {"qkv_proj": False, "o_proj": True, "gate_up_proj": True, "down_proj": True}


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["compiled" if HAS_GPU else "interpreted"], indirect=True)
def test_kernels_multiply_codes(write: Write, devices: Devices) -> None:
    """A little of it with Triton's kernels, also where they have to be interpreted."""
    small = {"max_num_seqs": 1, "max_model_len": 16, "max_num_batched_tokens": 16}
    with unrehearsed():
        found, expected = (
            answers(load(path, enforce_eager=True, **small), PROMPTS[:1], max_tokens=2) for path in write("gptq-4")
        )
    assert found == expected
