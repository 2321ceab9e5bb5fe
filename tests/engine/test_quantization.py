"""Weights and KV cache in few bits, end to end: what they cost in quality on text that the model was not trained on."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quire.worker.runner
from quire import LLM, SamplingParams
from quire.errors import ConfigError, QuireError
from quire.ops.native.library import TORCH

NUM_PROMPTS, PROMPT_LEN = 8, 400


class Reading(NamedTuple):
    """What a model makes of the text."""

    logits: Tensor  # [every fourth token, V]
    perplexity: float

    def error(self, exact: "Reading") -> float:
        """Mean absolute difference of the logits, in units of their standard deviation."""
        return ((self.logits - exact.logits).abs().mean() / exact.logits.std()).item()


@pytest.fixture(scope="module")
def read(shared_data: Path):
    """Readings of the demo model by engine options; each made once."""
    # The last of this file was held out when the model was trained.
    text = (shared_data / "text" / "children_and_adventure_pre1930.txt").read_text()[-100_000:]
    known: dict[tuple[Any, ...], Reading] = {}
    grabbed: list[Tensor] = []
    real = quire.worker.runner.prompt_logprobs

    def grab(logits: Tensor, *arguments: Any) -> Any:
        grabbed.append(logits[::4].float().clone())
        return real(logits, *arguments)

    def reading(**options: Any) -> Reading:
        key = tuple(sorted(options.items()))
        if key not in known:
            grabbed.clear()
            llm = LLM("demo", show_progress=False, **options)
            ids = llm.get_tokenizer().encode(text)
            prompts = [ids[i * PROMPT_LEN : (i + 1) * PROMPT_LEN] for i in range(NUM_PROMPTS)]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            total = 0.0
            for output in llm.generate(prompts, params, use_tqdm=False):
                entries = zip(output.prompt_token_ids or [], output.prompt_logprobs or [], strict=True)
                total += sum(entry[token].logprob for token, entry in entries if entry is not None)
            known[key] = Reading(torch.cat(grabbed), math.exp(-total / (NUM_PROMPTS * (PROMPT_LEN - 1))))
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.worker.runner.prompt_logprobs", grab)
        yield reading


@pytest.fixture(scope="module")
def exact(read) -> Reading:
    return read(dtype="float32", kernels=TORCH)


@pytest.mark.slow
def test_native_bfloat16_is_nearer_to_float32_than_torchs(read, exact: Reading, native: str) -> None:
    """Its sums and logits are not rounded on the way."""
    found = read()
    assert 0 < found.error(exact) < read(kernels=TORCH).error(exact)
    assert found.perplexity == pytest.approx(exact.perplexity, rel=5e-4)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", TORCH])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("quantization", "error", "loss"),
    [("int8", 0.0055, 1.5e-3), ("w8a8", 0.013, 5e-3), ("int4", 0.047, 0.016), ("w4a8", 0.05, 0.02)],
)
def test_quality_of_quantized_weights(
    read, exact: Reading, quantization: str, error: float, loss: float, dtype: str, kernels: str
) -> None:
    found = read(dtype=dtype, quantization=quantization, kernels=kernels)
    assert error / 2 < found.error(exact) < error * 1.25, "as many bits as the name says"
    assert 0 < found.perplexity / exact.perplexity - 1 < loss


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_torch_and_native_quantize_alike(read, quantization: str, native: str) -> None:
    ours, torchs = (read(dtype="float32", quantization=quantization, kernels=k) for k in ("auto", TORCH))
    assert ours.error(torchs) < 2e-4
    assert ours.perplexity == pytest.approx(torchs.perplexity, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_torch_and_native_round_activations_alike(read, quantization: str, native: str) -> None:
    """But where a sum's last bit decides which of two codes is nearer."""
    ours, torchs = (read(dtype="float32", quantization=quantization, kernels=k) for k in ("auto", TORCH))
    assert ours.error(torchs) < 0.01
    assert ours.perplexity == pytest.approx(torchs.perplexity, rel=2e-3)


@pytest.mark.slow
def test_quality_of_an_int8_cache(read, exact: Reading, native: str) -> None:
    plain, found = read(), read(kv_cache_dtype="int8")
    assert plain.error(exact) < found.error(exact) < 0.004
    assert found.perplexity == pytest.approx(exact.perplexity, rel=1e-3)


def test_quantized_text_is_text(native: str) -> None:
    llm = LLM("demo", show_progress=False, quantization="int4", kv_cache_dtype="int8", debug=True)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (output,) = llm.generate("Once upon a time there was a", params, use_tqdm=False)
    words = output.outputs[0].text.split()
    assert len(set(words)) > 8
    assert all(word.strip(".,;:!?\"'-").isalpha() for word in words[:3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int3"}, r"quantization must be one of None, 'int8', 'int4', 'w8a8', 'w4a8', .* got 'int3'"),
        ({"quantization": "awq"}, "quantization='awq' contradicts model 'demo', .* not quantized"),
        ({"kv_cache_dtype": "fp8"}, r"kv_cache_dtype='fp8' is for GPUs; a CPU has 'int8'"),
        ({"kv_cache_dtype": "fp16"}, r"kv_cache_dtype must be one of 'auto', 'int8', 'fp8', got 'fp16'"),
        ({"kernels": "cuda"}, "kernels must be one of 'auto', .* got 'cuda'"),
        ({"kv_cache_dtype": "int8", "kernels": TORCH}, "kv_cache_dtype='int8' needs the compiled kernels"),
        ({"kv_cache_dtype": "int8", "dtype": "float16"}, "kv_cache_dtype='int8' needs the compiled kernels"),
    ],
)
def test_refusals(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LLM("demo", show_progress=False, **options)
    assert isinstance(caught.value, QuireError)


def test_a_float16_checkpoint_runs_on_the_kernels(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    demo = LLM("demo", show_progress=False, device="cpu", kv_cache_dtype="int8")
    source, path = demo.llm_engine.config.model.path, tmp_path / "half"
    shutil.copytree(source, path)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float16", "torch_dtype": "float16"}
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in weights.items()}, path / "model.safetensors")
    # An int8 cache is refused without the kernels.
    half = LLM(str(path), show_progress=False, device="cpu", kv_cache_dtype="int8")
    assert half.llm_engine.config.model.dtype == "bfloat16"
    expected, got = (llm.generate("The sea", params, use_tqdm=False)[0].outputs[0] for llm in (demo, half))
    assert got.token_ids == expected.token_ids
    assert got.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)  # float16 lacks the smallest


def test_float16_runs_on_torch_by_itself() -> None:
    llm = LLM("demo", show_progress=False, dtype="float16", quantization="int8")
    params = SamplingParams(temperature=0, max_tokens=3)
    assert llm.generate("The sea", params, use_tqdm=False)[0].outputs[0].token_ids
