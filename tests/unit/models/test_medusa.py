"""Medusa heads are read in both published forms, and compute what their paper says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attention.registry import select_backend
from quire.errors import ModelLoadError
from quire.models.builder import BuildContext, Builder
from quire.models.compiled import CompiledHeads
from quire.models.heads import HeadCheckpoint
from quire.models.medusa import MedusaHeads, MedusaShape, read_shape
from quire.models.spec import TensorSpec
from quire.models.weights import CheckpointFormat, weight_slots
from quire.ops.native.library import library
from quire.quantization.packed import Packing
from quire.quantization.registry import select_formats

SIZE, VOCAB = 32, 48


def published(num_heads: int, num_layers: int, *, own_head: bool = True) -> dict[str, Tensor]:
    """As FasterDecoding's Medusa names them."""
    draw = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(SIZE, SIZE, generator=draw) * SIZE**-0.5
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(SIZE, generator=draw)
        if own_head:
            tensors[f"{head}.{num_layers}.weight"] = torch.randn(VOCAB, SIZE, generator=draw)
    return tensors


def of_vllm(num_heads: int, num_layers: int, prefix: str = "") -> dict[str, Tensor]:
    """The same weights, without biases, as vLLM names them."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in published(num_heads, num_layers).items():
        parts = name.split(".")
        if name.endswith("linear.weight"):
            tensors[f"{prefix}blocks.{parts[0]}.layers.{parts[1]}.weight"] = tensor
        elif not name.endswith("bias"):
            tensors[f"{prefix}lm_heads.{parts[0]}.weight"] = tensor
    return tensors


def checkpoint(config: dict[str, Any], tensors: dict[str, Tensor]) -> HeadCheckpoint:
    source: Any = SimpleNamespace(
        specs=[TensorSpec(name, "F32", tuple(t.shape), t.nbytes, "") for name, t in tensors.items()]
    )
    return HeadCheckpoint("heads", config, source)


def test_the_published_form_is_read() -> None:
    shape, names = read_shape(checkpoint({"medusa_num_heads": 3, "medusa_num_layers": 2}, published(3, 2)), 3)
    assert shape == MedusaShape(3, 2, SIZE, VOCAB)
    assert names["1.0.linear.bias"] == "blocks.1.0.bias"
    assert names["2.2.weight"] == "lm_heads.2.weight"
    assert set(names) == set(published(3, 2))


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_the_form_of_vllm_is_read(prefix: str) -> None:
    tensors = of_vllm(2, 1, prefix) | {"token_map": torch.arange(VOCAB)}
    config = {"num_heads": 2, "num_hidden_layers": 1, "logit_scale": 0.5}
    shape, names = read_shape(checkpoint(config, tensors), 2)
    assert shape == MedusaShape(2, 1, SIZE, VOCAB, bias=False, scale=0.5)
    assert names[f"{prefix}blocks.1.layers.0.weight"] == "blocks.1.0.weight"
    assert names["token_map"] is None
    shape, names = read_shape(checkpoint(config | {"original_lm_head": True}, tensors), 2)
    assert shape.num_outputs is None
    assert names[f"{prefix}lm_heads.1.weight"] is None


def test_the_first_heads_are_enough_and_unknown_names_are_left_out() -> None:
    tensors = published(4, 1, own_head=False) | {"scores.weight": torch.ones(2)}
    shape, names = read_shape(checkpoint({}, tensors), 2)
    assert shape == MedusaShape(2, 1, SIZE)
    assert names["2.0.linear.weight"] is None
    assert "scores.weight" not in names


@pytest.mark.parametrize(
    ("config", "num_heads", "message"),
    [
        ({}, 4, "are 3, and each drafts one token: num_speculative_tokens, or the depth .* is 4. Lower it"),
        ({"medusa_num_heads": 5}, 2, "are 5 of 1 layers by config.json, and its tensors are of 3 of 1"),
        ({"medusa_num_layers": 2}, 2, "are 3 of 2 layers by config.json, and its tensors are of 3 of 1"),
        ({"logit_scale": "big"}, 2, "have logit_scale = 'big' in config.json; it must be a number"),
    ],
)
def test_numbers_that_do_not_agree_are_said(config: dict[str, Any], num_heads: int, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_shape(checkpoint(config, published(3, 1)), num_heads)
    with pytest.raises(
        ModelLoadError, match=r"have no tensor that is called as a Medusa head's, as '0.0.linear.weight'"
    ):
        read_shape(checkpoint({}, {"model.embed_tokens.weight": torch.ones(4, 4)}), 1)


def built(tensors: dict[str, Tensor], num_heads: int, *, packed: bool, **config: Any) -> MedusaHeads:
    shape, names = read_shape(checkpoint(config, tensors), num_heads)
    packing = Packing(torch.float32, lambda shape, dtype, name: torch.zeros(shape, dtype=dtype)) if packed else None
    formats = select_formats(None, packing)
    context = BuildContext(select_backend("native" if packed else "reference"), formats, torch.float32)
    heads = MedusaHeads(shape, Builder(context))
    slots = weight_slots(heads, CheckpointFormat(prefix=""))
    for name, ours in names.items():
        if ours is not None:
            slots.pop(ours).load(tensors[name])
    assert not slots
    return heads


@pytest.mark.parametrize("packed", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("form", ["published", "vllm"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_logits_are_those_of_plain_torch(packed: bool, form: str, num_layers: int) -> None:
    if packed and library() is None:
        pytest.skip("no compiled kernels")
    config = {} if form == "published" else {"logit_scale": 0.25}
    tensors = published(3, num_layers) if form == "published" else of_vllm(3, num_layers)
    heads = built(tensors, 2, packed=packed, **config)
    rows = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(2))

    def plain(head: int) -> Tensor:
        x = rows
        for layer in range(num_layers):
            weight = tensors[f"{head}.{layer}.linear.weight" if not config else f"blocks.{head}.layers.{layer}.weight"]
            x = x + F.silu(F.linear(x, weight, tensors.get(f"{head}.{layer}.linear.bias")))
        if config:
            return x @ tensors[f"lm_heads.{head}.weight"].T * 0.25
        return x @ tensors[f"{head}.{num_layers}.weight"].T

    if packed:
        found = CompiledHeads(lambda x: heads(x, 2), SIZE, torch.float32)(rows)
        alone = CompiledHeads(lambda x: heads(x, 2), SIZE, torch.float32)(rows[3:4])
        assert torch.equal(alone[0], found[3])  # whatever the batch
    else:
        found = torch.stack(heads(rows, 2), 1)
    assert found.shape == (5, 2, VOCAB)
    for head in range(2):
        torch.testing.assert_close(found[:, head], plain(head), rtol=1e-4, atol=1e-4)


def test_without_output_heads_they_give_what_the_models_takes() -> None:
    tensors = published(2, 1, own_head=False)
    rows = torch.randn(3, SIZE)
    first, second = built(tensors, 2, packed=False)(rows, 2)
    weight, bias = tensors["1.0.linear.weight"], tensors["1.0.linear.bias"]
    torch.testing.assert_close(second, rows + F.silu(F.linear(rows, weight, bias)), rtol=1e-4, atol=1e-5)
    assert first.shape == second.shape == (3, SIZE)
