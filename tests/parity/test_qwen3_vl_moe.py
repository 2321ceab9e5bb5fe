"""The text of Qwen3-VL-MoE, whose experts are tensors of two layouts: as published, and as transformers writes them."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.ops.native.library import TORCH

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
tiny: Any = importlib.import_module("tiny_models")

PROMPT = [5, 90, 17, 3, 3, 41, 8, 77, 60, 12, 9, 33, 34, 35, 9, 9, 10, 4, 80, 2]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return tiny.build_theirs("qwen3-vl-moe")


@pytest.fixture(params=["written", "published"])
def directory(theirs: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny.save(theirs, tmp_path)
    if request.param == "published":
        tensors = load_file(tmp_path / "model.safetensors")
        turned = {name: x.transpose(1, 2).contiguous() for name, x in tensors.items() if ".mlp.experts." in name}
        assert turned
        save_file(tensors | turned, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@torch.inference_mode()
def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def test_transformers_reads_both(theirs: Any, directory: Path) -> None:
    again = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(directory).eval()
    torch.testing.assert_close(logits(again, PROMPT), logits(theirs, PROMPT), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernels", [TORCH, "native"], indirect=True)
def test_logits(theirs: Any, directory: Path, kernels: str) -> None:
    found = tiny.Paged(tiny.build_ours(directory, "float32", kernels)).prefill(0, PROMPT, chunk=6)
    torch.testing.assert_close(found, logits(theirs, PROMPT), atol=1e-4, rtol=0)


def test_quantized_weights(theirs: Any, directory: Path, native: str) -> None:
    expected = logits(theirs, PROMPT)
    ours = tiny.build_ours(directory, "bfloat16", native, quantization="int8")
    error = (tiny.Paged(ours).prefill(0, PROMPT).float() - expected).square().mean(-1).sqrt().median() / expected.std()
    assert error < 0.1  # of most positions, as others choose other experts


def test_whether_heads_are_tied_the_whole_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And not its text, of which transformers writes that they are, where nobody has said anything."""
    config_class, model_class, arguments = tiny.SEEING["qwen3-vl-moe"]
    text = {key: value for key, value in arguments["text_config"].items() if key != "tie_word_embeddings"}
    monkeypatch.setitem(tiny.SEEING, "silent", (config_class, model_class, arguments | {"text_config": text}))
    theirs = tiny.build_theirs("silent")
    assert theirs.config.text_config.tie_word_embeddings
    found = tiny.Paged(tiny.build_ours(tiny.save(theirs, tmp_path))).prefill(0, PROMPT)
    torch.testing.assert_close(found, logits(theirs, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_ranks_and_stages(directory: Path) -> None:
    answers = []
    greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=2, detokenize=False)
    for options in ({}, {"tensor_parallel_size": 2}, {"enable_expert_parallel": True}, {"pipeline_parallel_size": 2}):
        many = {"tensor_parallel_size": 2} if "enable_expert_parallel" in options else {}
        fixed = {"skip_tokenizer_init": True, "show_progress": False, "max_model_len": 64, "weight_cache": False}
        llm = LLM(str(directory), dtype="bfloat16", **fixed, **options, **many)
        [found] = llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
        answers.append((found.outputs[0].token_ids, found.outputs[0].logprobs))
        llm.llm_engine.shutdown()
    assert all(answer == answers[0] for answer in answers)
