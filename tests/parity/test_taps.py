"""Hidden states on their way through the layers: the same in plain torch, recorded, and without being looked at."""

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
tiny: Any = importlib.import_module("tiny_models")

TAPPED = (0, 1)


@pytest.mark.parametrize("name", ["llama", "opt-350m", "gemma3", "mixtral"])
def test_taps_are_what_leaves_a_layer(tmp_path: Path, name: str, kernels: str) -> None:
    theirs = tiny.build_theirs(name)
    ours = tiny.build_ours(tiny.save(theirs, tmp_path / name), kernels=kernels, tapped=TAPPED)
    tokens = [random.Random(1).randrange(3, 97) for _ in range(40)]
    paged = tiny.Paged(ours, taps=TAPPED)
    logits = paged.prefill(0, tokens, chunk=17)
    plain = tiny.build_ours(tmp_path / name, kernels=kernels)
    assert torch.equal(logits, tiny.Paged(plain).prefill(0, tokens))
    found = [torch.cat(parts) for parts in zip(*paged.tapped, strict=True)]
    with torch.inference_mode():
        expected: list[Tensor] = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    # The last layer's output has the final norm on it there.
    torch.testing.assert_close(found[0], expected[1][0], atol=1e-4, rtol=1e-4)
    assert len(found) == len(TAPPED)
