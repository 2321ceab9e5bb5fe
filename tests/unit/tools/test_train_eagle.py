"""The training of EAGLE heads: drafts in a row see what they will see, and the engine takes what is trained."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quire import LLM, SamplingParams

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The training script as a module, and the one that it builds upon."""
    for name in ("train_demo", "train_eagle"):
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def test_drafts_in_a_row_are_taught_as_they_are_drafted(script: ModuleType) -> None:
    """The second draft sees the true states of the tokens before, then the head's own output: as one by one."""
    torch.manual_seed(0)
    demo = sys.modules["train_demo"]
    model = demo.Llama(demo.Shape(64, 32, 64, 1, 4, 2, 64)).eval()
    head = script.EagleHead(model, "eagle")
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    embedded, hidden, cos, sin = torch.randn(1, 9, 32), torch.randn(1, 9, 32), model.cos[:9], model.sin[:9]
    with torch.no_grad():
        first, second = head.unroll(embedded, hidden, cos, sin, 2)
        for p in range(1, 9):
            states = hidden[:, : p + 1].clone()
            states[:, p] = first[:, p - 1]
            [alone] = head.unroll(embedded[:, : p + 1], states, cos[: p + 1], sin[: p + 1], 1)
            torch.testing.assert_close(second[:, p], alone[:, p], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_short_training_makes_a_head_that_the_engine_takes(script: ModuleType, tmp_path: Path) -> None:
    kind = "eagle3"
    script.main([kind, "--out", str(tmp_path), "--texts", "70", "--seconds", "0.5", "--at-most", "20", "--rows", "2"])
    assert (tmp_path / "model.safetensors").stat().st_size < 1_000_000
    speculative = {"method": kind, "model": str(tmp_path), "num_speculative_tokens": 2, "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=8)
    (plain,) = LLM("demo").generate("Once upon", params, use_tqdm=False)
    (drafted,) = LLM("demo", speculative_config=speculative).generate("Once upon", params, use_tqdm=False)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
