"""GGUF files of tiny models of every family compute what the checkpoints that they were converted from do."""

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.gguf import read_gguf
from quire.config.model import ModelConfig
from quire.models.gguf import GGUFTypes
from quire.models.registry import build_model
from quire.quantization.base import Unquantized
from quire.quantization.registry import uniform
from quire.worker.weights.load import load_model_weights

pytest.importorskip("transformers")
pytest.importorskip("gguf")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
tiny: Any = importlib.import_module("tiny_models")
gguf_files: Any = importlib.import_module("gguf_files")


NAMES = (
    "llama", "llama-tied-mha", "llama-linear", "llama-yarn", "llama-llama3", "mistral", "mistral-full",
    "phi3", "phi3-longrope", "phi3-longrope-short", "qwen2", "qwen3", "mixtral", "mixtral-window", "qwen2-moe",
    "qwen3-moe", "gemma", "gpt2",
    "seed-oss", "smollm3", "granite", "granite-biases", "granitemoe", "qwen2.5-vl", "qwen3-vl",
    "olmo2", "olmo3", "olmoe", "glm4", "glm4-whole-heads", "exaone4", "exaone4-full", "cohere", "cohere2",
    "arcee", "arcee-biases", "starcoder2-windowless", "ernie4.5", "qwen3-vl-moe",
)  # fmt: skip


def build(path: Path) -> Any:
    config = ModelConfig.from_pretrained(str(path), max_model_len=256)
    backend = tiny.select_backend("reference")
    model = build_model(config, backend, uniform(Unquantized()))
    load_model_weights(model, config, "auto", progress=False)
    return tiny.Ours(model, model, backend)


@pytest.mark.parametrize("name", NAMES)
def test_a_float32_file_computes_the_same(tmp_path: Path, name: str) -> None:
    directory = tiny.save(tiny.build_theirs(name), tmp_path / "model")
    rng = random.Random(0)
    prompt = [rng.randrange(3, 97) for _ in range(110)]
    expected = tiny.Paged(build(directory)).prefill(0, prompt)
    found = tiny.Paged(build(gguf_files.convert(directory, tmp_path / "model.gguf"))).prefill(0, prompt)
    # What is not the same bit for bit: epsilon and theta in float32, norms with one added, factors of Llama 3's.
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "num_layers"), [("Gemma2", 3), ("Gemma3", 7)])
def test_later_gemmas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_layers: int) -> None:
    """llama.cpp's code has their pattern of windows and their scale of scores, so the cases are of their own."""
    of_text = "Text" if name == "Gemma3" else ""
    arguments = tiny.GEMMA | {"sliding_window": 24, "num_hidden_layers": num_layers, "query_pre_attn_scalar": 16}
    monkeypatch.setitem(tiny.CASES, name, (f"{name}{of_text}Config", f"{name}ForCausalLM", arguments))
    test_a_float32_file_computes_the_same(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-moe", "mixtral", "gpt2"])
def test_blocks_compute_what_their_values_do(tmp_path: Path, name: str, multiplying_numbers: str) -> None:
    """Experts, and matrices that checkpoints hold the other way around, too."""
    directory = tiny.save(tiny.build_theirs(name), tmp_path / "model")
    found: list[Any] = []
    for dequantized in (False, True):
        path = tmp_path / f"{dequantized}.gguf"
        gguf_files.convert(directory, path, gguf_files.Kind.Q8_0, dequantized=dequantized)
        assert bool(GGUFTypes(read_gguf(path))) != dequantized
        options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64, "show_progress": False}
        llm = LLM(str(path), dtype="bfloat16", kernels=multiplying_numbers, **options)
        params = SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": [5, 9, 17, 33, 41]}], params, use_tqdm=False)
        found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1]
