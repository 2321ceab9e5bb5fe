"""The demo in the formats of quantized checkpoints: what it answers is what the dequantized demo answers."""

import copy
import importlib
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ModelLoadError
from quire.ops.native.library import TORCH

sys.path.insert(0, str(Path(__file__).parents[1]))
files: Any = importlib.import_module("quantized_files")
PROMPTS = ["Once upon a time", "The 3 dogs, 1234 of them", "A", "It was late when she came"]
SOME = ["gptq-3", "gptq-4", "awq-gemm", "fp8-block", "ct-w4-zeros", "bnb-nested"]


def answers(model: Path, prompts: Any = PROMPTS, **options: Any) -> list[Any]:
    """Tokens and logprobs."""
    llm = LLM(str(model), max_model_len=128, **({"weight_cache": False} | options))
    wants_text = not options.get("skip_tokenizer_init")
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True, detokenize=wants_text)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(out.outputs[0].token_ids), out.outputs[0].logprobs) for out in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("case", SOME)
def test_answers_are_those_of_the_dequantized_model(tmp_path: Path, case: str, multiplying_numbers: str) -> None:
    values = files.write(tmp_path / "quantized", *files.CASES[case])
    files.write_values(tmp_path / "plain", values, torch.bfloat16)
    numbers, plain = (answers(tmp_path / name, kernels=multiplying_numbers) for name in ("quantized", "plain"))
    assert numbers == plain, "values are rounded once, to the model's type"
    found = answers(tmp_path / "quantized")
    for (tokens, logprobs), (near, others) in zip(found, numbers, strict=True):
        assert logprobs[0][tokens[0]].logprob == pytest.approx(others[0][near[0]].logprob, abs=0.1)
    assert [answers(tmp_path / "quantized", [prompt])[0] for prompt in PROMPTS[:2]] == found[:2], (
        "whoever shares a batch"
    )


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [("visual",), ()], ids=["a-plain-tower", "a-quantized-tower"])
@pytest.mark.parametrize("case", ["awq-gemm-sym", "ct-w4", "bnb-nested"])
def test_the_text_of_models_that_see(tmp_path: Path, case: str, ignored: tuple[str, ...]) -> None:
    """As it is published: the language model's layers are quantized, and mostly those alone."""
    sys.path.append(str(Path(__file__).parents[1] / "parity"))
    tiny: Any = importlib.import_module("tiny_models")
    name = "qwen2.5-vl" if ignored else "qwen3-vl"  # whose tensors are named in two ways
    source = tiny.save(tiny.build_theirs(name), tmp_path / "source")
    values = files.write(tmp_path / "quantized", *files.CASES[case], ignored, source)
    files.write_values(tmp_path / "plain", values, torch.float32, source)
    options = {"kernels": TORCH, "skip_tokenizer_init": True}
    prompt = {"prompt_token_ids": list(range(3, 20))}
    quantized, plain = (answers(tmp_path / each, prompt, **options) for each in ("quantized", "plain"))
    assert quantized == plain


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["auto", TORCH])
@pytest.mark.parametrize("case", files.CASES)
def test_every_format_in_every_type(
    tmp_path: Path, case: str, kernels: str, dtype: str, multiplying_numbers: str
) -> None:
    kernels = multiplying_numbers if kernels == "auto" else kernels
    values = files.write(tmp_path / "quantized", *files.CASES[case])
    files.write_values(tmp_path / "plain", values, getattr(torch, dtype))
    options = {"kernels": kernels, "dtype": dtype}
    assert answers(tmp_path / "quantized", **options) == answers(tmp_path / "plain", **options)


def test_layers_that_are_left_alone_and_parts_of_several_types(tmp_path: Path, multiplying_numbers: str) -> None:
    """Queries stay plain, so that the three are one matrix of numbers; the last layer is plain whole."""
    stated, quantize = files.CASES["ct-w4"]
    values = files.write(tmp_path / "quantized", stated, quantize, ("q_proj", "layers.4."))
    files.write_values(tmp_path / "plain", values, torch.bfloat16)
    options = {"kernels": multiplying_numbers}
    assert answers(tmp_path / "quantized", **options) == answers(tmp_path / "plain", **options)


@pytest.mark.slow
def test_activations_in_eight_bits(tmp_path: Path, native: str) -> None:
    """Where a checkpoint asks for them: near what its weights alone would say, and the same whoever shares a batch."""
    stated, quantize = copy.deepcopy(files.CASES["ct-int8"][0]), files.CASES["ct-int8"][1]
    files.write(tmp_path / "weights", stated, quantize)
    stated["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
    files.write(tmp_path / "both", stated, quantize)
    expected, found = answers(tmp_path / "weights"), answers(tmp_path / "both")
    assert found != expected
    for (tokens, logprobs), (near, others) in zip(found, expected, strict=True):
        assert logprobs[0][tokens[0]].logprob == pytest.approx(others[0][near[0]].logprob, abs=0.3)
    assert [answers(tmp_path / "both", [prompt])[0] for prompt in PROMPTS[:2]] == found[:2]
    assert answers(tmp_path / "both", tensor_parallel_size=2) == found


@pytest.mark.parametrize("ignored", ["q_proj", "up_proj"])
def test_activations_in_eight_bits_for_parts_of_a_layer(tmp_path: Path, ignored: str, native: str) -> None:
    """The others are plain: a merged layer is two matrices, of which one has scales of its own."""
    stated, quantize = copy.deepcopy(files.CASES["ct-int8"][0]), files.CASES["ct-int8"][1]
    stated["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
    values = files.write(tmp_path / "both", stated, quantize, (ignored,))
    files.write_values(tmp_path / "plain", values, torch.bfloat16)
    expected, found = answers(tmp_path / "plain"), answers(tmp_path / "both")
    for (tokens, logprobs), (near, others) in zip(found, expected, strict=True):
        assert logprobs[0][tokens[0]].logprob == pytest.approx(others[0][near[0]].logprob, abs=0.3)


@pytest.mark.slow
def test_two_ranks(tmp_path: Path, native: str, caplog: pytest.LogCaptureFixture) -> None:
    files.write(tmp_path, *files.CASES["awq-gemm"])
    assert answers(tmp_path, tensor_parallel_size=2) == answers(tmp_path)


def test_packed_weights_are_kept(tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the settings that they were made by: zeros of the second version are others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("quire.worker.weights.cache.MIN_BYTES", 0)
    stated, quantize = files.CASES["gptq-4"]
    files.write(tmp_path / "model", stated, quantize)
    first = answers(tmp_path / "model", weight_cache=True)
    assert answers(tmp_path / "model", weight_cache=True) == first
    files.write(tmp_path / "model", stated | {"checkpoint_format": "gptq_v2"}, quantize)
    assert answers(tmp_path / "model", weight_cache=True) != first


def test_what_has_no_form_in_blocks_is_said(tmp_path: Path, native: str, caplog: pytest.LogCaptureFixture) -> None:
    files.write(tmp_path, *files.CASES["gptq-4-order"])
    with caplog.at_level(logging.INFO):
        LLM(str(tmp_path), max_model_len=64, weight_cache=False)
    assert "35 matrices can't be kept in blocks here and are dequantized (model.layers." in caplog.text


def test_pickles_are_refused(tmp_path: Path) -> None:
    files.write(tmp_path, *files.CASES["gptq-4"], only="layers.0.self_attn.q_proj")
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit.bin")
    with pytest.raises(ModelLoadError, match="pickle files"):
        LLM(str(tmp_path))
