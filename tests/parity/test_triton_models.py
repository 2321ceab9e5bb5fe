"""Whole tiny models with the kernels for GPUs, interpreted: near plain torch, and the same bits on every path."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels import uninstall

pytest.importorskip("transformers")
pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parent))
tiny: Any = importlib.import_module("tiny_models")


def slow(*case: str | None) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


TOKENS = [5, 90, 17, 3, 3, 41, 8, 77, 60, 12, 9]
CASES = [
    slow("llama-biases-mqa", None, "float32"),
    ("llama", "int8", "bfloat16"),
    slow("llama", "int4", "float32"),
    slow("gemma2-caps", None, "bfloat16"),
    slow("qwen2-moe", None, "float32"),
    slow("opt-350m", None, "float32"),
    slow("gpt-oss", None, "float32"),
    slow("granite", None, "bfloat16"),
    slow("ministral3", None, "float32"),
    slow("olmo2", None, "float32"),
    slow("cohere2", "int4", "float32"),
    ("gpt2", None, "float16"),
]


@pytest.fixture
def kernels() -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("on a machine with a GPU the kernels are not interpreted")
    from quire.ops.triton import install

    install("cpu")
    yield
    uninstall()


@pytest.mark.parametrize(("name", "quantization", "dtype"), CASES)
def test_a_model(kernels: None, name: str, quantization: str | None, dtype: str, tmp_path: Path) -> None:
    from quire.ops.triton import install

    tiny.save(tiny.build_theirs(name), tmp_path)
    ours = tiny.build_ours(tmp_path, dtype, quantization=quantization, max_model_len=256)
    whole = tiny.Paged(ours, max_len=32).prefill(0, TOKENS)
    steps = tiny.Paged(ours, max_len=32, num_sequences=2)
    beside = [steps.step({0: TOKENS[:4]})[0], steps.step({1: TOKENS[:7], 0: TOKENS[4:5]})[0]]
    beside.append(steps.step({0: TOKENS[5:], 1: TOKENS[7:8]})[0])
    assert torch.equal(torch.cat(beside), whole)
    uninstall()
    plain = tiny.Paged(ours, max_len=32).prefill(0, TOKENS)
    install("cpu")
    bound = {"float32": 1e-5, "bfloat16": 0.15, "float16": 0.02}[dtype]
    error = (whole.float() - plain.float()).abs().max() / plain.float().std()
    assert error < bound, float(error)
