"""The training of heads: what a head is taught, and one very short training whose heads the engine takes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quire import LLM, SamplingParams
from quire.utils.hub import resolve_model_path

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The training script as a module, and the one that it builds upon."""
    for name in ("train_demo", "train_heads"):
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def test_heads_are_taught_what_the_model_says_further_ahead(script: ModuleType) -> None:
    """The gradients are those of the mean cross-entropies with the model's distributions, as autograd has them."""
    torch.manual_seed(0)
    demo = sys.modules["train_demo"]
    model = demo.Llama(demo.Shape(64, 32, 64, 1, 2, 1, 64)).eval()
    heads = nn.ModuleList(script.MedusaHead(32, 2) for _ in range(2))
    ids = torch.randint(64, (2, 20))
    losses = script.teach(heads, model, ids, 1.0)
    taught = [weight.grad.clone() for weight in heads.parameters() if weight.grad is not None]
    heads.zero_grad()
    with torch.no_grad():
        hidden = model(ids)
        wanted = (hidden @ model.embed_tokens.weight.T).softmax(-1)
    for j, head in enumerate(heads):
        logits = head(hidden[:, : -1 - j]) @ model.embed_tokens.weight.T
        loss = -(wanted[:, 1 + j :] * logits.log_softmax(-1)).sum(-1).mean()
        assert loss.item() == pytest.approx(losses[j].item(), rel=0.02)
        loss.backward()
    for found, weight in zip(taught, heads.parameters(), strict=True):
        assert weight.grad is not None
        assert torch.nn.functional.cosine_similarity(found.flatten(), weight.grad.flatten(), dim=0) > 0.98


@pytest.mark.slow
def test_a_short_training_makes_heads_that_the_engine_takes(script: ModuleType, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    pages = [f"The cat number {i} sat on the mat and looked at the old dog in the garden." for i in range(300)]
    text.write_text("## CHAPTER I\n\n" + "\n\n".join(pages), encoding="utf-8")
    sizes = "--heads 2 --written 60 --text-share 2 --length 64 --rows 2 --steps 4 --threads 1"
    script.main(["medusa", str(text), "--out", str(tmp_path / "heads"), *sizes.split()])
    config = {"method": "medusa", "model": str(tmp_path / "heads"), "num_speculative_tokens": 2}
    llm = LLM("demo", speculative_config=config)
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 10


def test_what_is_shipped_is_small_and_as_it_was_published() -> None:
    folder = resolve_model_path("demo-medusa")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000
    tensors = load_file(folder / "model.safetensors")
    assert sorted(tensors) == sorted(f"{i}.0.linear.{kind}" for i in range(4) for kind in ("weight", "bias"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
