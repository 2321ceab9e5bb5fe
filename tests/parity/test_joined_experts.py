"""Checkpoints that hold a layer's experts as transformers does in memory: one tensor, and names of its own."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
tiny: Any = importlib.import_module("tiny_models")

PROMPT = [5, 90, 17, 3, 3, 41, 8, 77, 60, 12, 9, 33, 34, 35, 9, 9, 10, 4, 80, 2]


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe", "olmoe", "granitemoe"])
def test_they_are_the_same_model(name: str, tmp_path: Path) -> None:
    theirs = tiny.build_theirs(name)
    found = []
    for folder in (tmp_path / "published", tmp_path / "joined"):
        theirs.save_pretrained(folder, save_original_format=folder.name == "published")
        found.append(tiny.Paged(tiny.build_ours(folder)).prefill(0, PROMPT))
    joined = {key: x for key, x in load_file(folder / "model.safetensors").items() if ".experts." in key}
    assert all(x.dim() == 3 for x in joined.values())
    assert torch.equal(*found)
