"""A checkpoint's own codes are kept as they come in blocks: the formula's values, few bytes, however they arrive."""

import math

import pytest
import torch
from torch import Tensor

from quire.layers.linear import Linear, Place
from quire.models.packings import Numbers
from quire.quantization.base import MatrixShape, Unquantized
from quire.quantization.coded import Coded
from quire.quantization.grouped import KEPT
from quire.quantization.registry import select_formats

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PARTS = {"q_proj": 21, "k_proj": 5, "v_proj": 40}
# Type, columns, columns that share a scale, whether there are zeros.
CASES = [
    ("U4_32", 32, 32, True),
    ("U4_32", 160, 32, False),
    ("U4_32", 192, 64, True),
    ("U4_32", 192, 96, True),
    ("U4_128", 96, 96, True),
    ("U4_128", 256, 128, True),
    ("U4_128", 288, 288, False),
    ("U4_128", 416, 256, True),
    ("U8_32", 96, 32, True),
    ("U8_128", 160, 160, False),
    ("U8_128", 384, 128, True),
    ("F8_128", 64, 64, False),
    ("F8_128", 288, 128, False),
]


def numbers(kind: str, num_rows: int, num_columns: int, group: int, zeros: bool, seed: int = 0) -> Numbers:
    """Any codes, scales of several sizes, and zeros at both ends of their range."""
    generator = torch.Generator().manual_seed(seed)
    num_groups, most = -(-num_columns // group), 16 if kind.startswith("U4") else 256
    codes = torch.randint(most, (num_rows, num_columns), generator=generator).to(torch.uint8)
    scales = torch.randn(num_rows, num_groups, generator=generator).half().float() * 0.01
    if kind.startswith("F8"):
        return Numbers(codes.where(codes & 127 != 127, 0), scales, None, group, "float8")
    found = torch.randint(most, (num_rows, num_groups), generator=generator, dtype=torch.int32)
    found[0], found[-1] = 0, most - 1
    return Numbers(codes, scales, found if zeros else torch.full_like(found, most // 2), group)


def blocks(found: Numbers, kind: str) -> Tensor:
    return found.blocks(kind.startswith("U8"), int(kind[3:]))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("kind", "num_columns", "group", "zeros"), CASES)
def test_values_are_those_of_the_formula(
    kind: str, num_columns: int, group: int, zeros: bool, dtype: torch.dtype
) -> None:
    """Of a merged layer whose parts come in any order, and so are its products."""
    layers = [
        Linear(Place("attn.qkv_proj", m, dtype), num_columns, PARTS, bias=True) for m in (Coded(kind), Unquantized())
    ]
    plain = {slot.name: slot for slot in layers[1].checkpoint_slots("attn.qkv_proj")}
    for slot in reversed(list(layers[0].checkpoint_slots("attn.qkv_proj"))):
        rows = slot.form.shape[0]
        if slot.name.endswith("bias"):
            slot.load(torch.arange(rows).to(dtype))
            plain[slot.name].load(torch.arange(rows).to(dtype))
            continue
        found = numbers(kind, rows, num_columns, group, zeros, seed=rows)
        assert (slot.form.shape[1], slot.form.num_weights) == (num_columns * 5 // 4, rows * num_columns)
        slot.load(blocks(found, kind))
        plain[slot.name].load(found.dense(dtype))
    weights, dense = layers[0].weights, layers[1].weights["weight"]
    ids = torch.tensor([65, 0, 3, 21, 30])
    assert torch.equal(layers[0].method.lookup(weights, layers[0].shape, ids, dtype), dense[ids])
    x = torch.randn(9, num_columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(*(layer(x) for layer in layers))
    assert torch.equal(*(layer(x[:2], wide=True).to(dtype) for layer in layers))


@pytest.mark.parametrize(("kind", "most_bits"), [*zip(KEPT, (5.26, 4.33, 9.26, 8.33, 8.33), strict=True)])
def test_few_bits_are_kept(kind: str, most_bits: float) -> None:
    weights = Coded(kind).create_weights(MatrixShape(1024, 3000), BF16)
    assert sum(each.nbytes for each in weights.values()) * 8 <= most_bits * 1024 * 3000


def test_many_rows_are_taken_apart_a_part_at_a_time() -> None:
    method, shape, found = Coded("U4_128"), MatrixShape(128, 2500), numbers("U4_128", 2500, 128, 128, True)
    weights = method.create_weights(shape, BF16)
    rows = blocks(found, "U4_128")
    for start, stop in ((1100, 2500), (0, 7), (7, 1100)):
        method.load(weights, shape, rows[start:stop], start)
    dense = found.dense(BF16)
    assert torch.equal(method.lookup(weights, shape, torch.arange(2500), BF16), dense)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(BF16)
    torch.testing.assert_close(method.apply(weights, shape, x), Unquantized().apply({"weight": dense}, shape, x))


@pytest.mark.parametrize("column", [0, 40, 127, 128, 159])
def test_codes_of_float8_that_are_no_numbers_show(column: int) -> None:
    found = numbers("F8_128", 3, 160, 128, False)
    found.codes[1, column] = 255
    method, shape = Coded("F8_128"), MatrixShape(160, 3)
    weights = method.create_weights(shape, BF16)
    method.load(weights, shape, blocks(found, "F8_128"), 0)
    sums = method.apply(weights, shape, torch.ones(1, 160, dtype=BF16)).flatten().tolist()
    assert [math.isnan(each) for each in sums] == [False, True, False]


def test_a_device_keeps_what_its_kernels_know_and_merges_only_what_is_alike() -> None:
    kinds = {"attn.q": "U4_128", "attn.k": "U4_128", "attn.v": "U8_32", "mlp.gate": "F8_128", "mlp.up": "F8_128"}
    formats = select_formats(None, None, blocks=kinds | {"head": "C4_32"}, on_device=True)
    assert isinstance(formats.method_for("attn.q"), Coded)
    assert formats.method_for("attn.qk", parts=("q", "k")) is formats.method_for("attn.q")
    assert formats.method_for("mlp.gate_up", parts=("gate", "up")) is formats.method_for("mlp.gate")
    for several in (formats.method_for("attn.qkv", parts=("q", "k", "v")), formats.method_for("head")):
        assert isinstance(several, Unquantized)
