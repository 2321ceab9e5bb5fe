"""Heads are read from safetensors and from pickles, and refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quire.errors import ModelLoadError
from quire.layers.linear import Linear, Place
from quire.models.heads import fill_heads, open_heads
from quire.quantization.base import Unquantized

NAMES = {"0.linear.weight": "first.weight", "0.linear.bias": "first.bias"}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(Place("first", Unquantized(), torch.float32), 4, 3, bias=True)


def tensors() -> dict[str, Tensor]:
    return {"0.linear.weight": torch.arange(12.0).view(3, 4), "0.linear.bias": torch.ones(3)}


def write(folder: Path, held: Any, file: str = "model.safetensors", config: str = '{"num_heads": 1}') -> Path:
    (folder / "config.json").write_text(config)
    if file.endswith("safetensors"):
        save_file(held, folder / file)
    else:
        torch.save(held, folder / file)
    return folder


@pytest.mark.parametrize("file", ["model.safetensors", "medusa_lm_head.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_either_form_fill_the_layers(tmp_path: Path, file: str, dtype: torch.dtype) -> None:
    held = {name: one.to(dtype) for name, one in tensors().items()} | {"unused": torch.ones(2)}
    checkpoint = open_heads(write(tmp_path, held, file), "mine")
    assert checkpoint.shapes == {"0.linear.weight": (3, 4), "0.linear.bias": (3,), "unused": (2,)}
    assert checkpoint.number("medusa_num_heads", "num_heads", default=4) == 1
    assert checkpoint.number("num_layers", default=4) == 4
    heads = Heads()
    fill_heads(heads, checkpoint, {**NAMES, "unused": None}, torch.float32)
    assert torch.equal(heads.first.weights["weight"], tensors()["0.linear.weight"])
    assert torch.equal(heads.first.weights["bias"], tensors()["0.linear.bias"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.linear.bias": None}, "'mine' lack 1 tensors: 0.linear.bias"),
        ({"0.linear.bias": torch.ones(4)}, r"'0.linear.bias' as F32 \[4\] in model.safetensors, where floats \[3\]"),
        ({"0.linear.bias": torch.ones(3, dtype=torch.int32)}, r"'0.linear.bias' as I32 \[3\]"),
        ({"1.linear.bias": torch.ones(3)}, "'mine' have a tensor '1.linear.bias' in model.safetensors"),
        ({"again.bias": torch.ones(3)}, "'mine' have two tensors for one place; "),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    held = {name: one for name, one in (tensors() | change).items() if one is not None}
    names: dict[str, str | None] = {**NAMES, "again.bias": "first.bias"}
    with pytest.raises(ModelLoadError, match=message):
        fill_heads(Heads(), open_heads(write(tmp_path, held), "mine"), names, torch.float32)


class Other:
    """What no unpickler may make."""


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (Other(), "medusa_lm_head.pt can't be read as a file of tensors .UnpicklingError.: it is damaged, or holds"),
        ([torch.ones(2)], "medusa_lm_head.pt is no map from names to tensors"),
        ({"a": 1}, "medusa_lm_head.pt is no map from names to tensors"),
        ({"a": torch.ones(2).to_sparse()}, "medusa_lm_head.pt is no map from names to tensors"),
    ],
)
def test_pickles_of_anything_but_tensors_are_refused(tmp_path: Path, held: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        open_heads(write(tmp_path, held, "medusa_lm_head.pt"), "mine")


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="Model 'mine' has no config.json"):
        open_heads(tmp_path, "mine")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="config.json of model 'mine' is not valid JSON"):
        open_heads(tmp_path, "mine")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match="config.json of model 'mine' must hold a JSON object"):
        open_heads(tmp_path, "mine")
    (tmp_path / "config.json").write_text('{"num_heads": 0}')
    with pytest.raises(ModelLoadError, match=r"The heads 'mine' have no \*.safetensors and no \*.pt or \*.bin"):
        open_heads(tmp_path, "mine")
    with pytest.raises(ModelLoadError, match="'mine' have num_heads = 0 in config.json; it must be a whole number"):
        open_heads(tmp_path, "mine", load_format="dummy").number("num_heads", default=1)
    torch.save(tensors(), tmp_path / "medusa_lm_head.pt")
    whole = (tmp_path / "medusa_lm_head.pt").read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 40):
        (tmp_path / "medusa_lm_head.pt").write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match="medusa_lm_head.pt can't be read as a file of tensors"):
            open_heads(tmp_path, "mine")
    (tmp_path / "other.bin").write_bytes(whole)
    with pytest.raises(ModelLoadError, match="have medusa_lm_head.pt, other.bin: leave the one that is to be read"):
        open_heads(tmp_path, "mine")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ModelLoadError, match="model.safetensors is truncated or corrupt"):
        open_heads(tmp_path, "mine")


def test_without_tensors_heads_may_be_random(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    checkpoint = open_heads(tmp_path, "mine", load_format="dummy")
    one, other = Heads(), Heads()
    fill_heads(one, checkpoint, {}, torch.float32, seed=3)
    fill_heads(other, checkpoint, {}, torch.float32, seed=3)
    assert torch.equal(one.first.weights["weight"], other.first.weights["weight"])
    assert one.first.weights["weight"].std() > 0
