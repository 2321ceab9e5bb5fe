"""Weights in few bits: plain-torch twins and packed formats hold the same numbers, however a layer's parts arrive."""

from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor
from unpacking import unpacked

from quire import EngineArgs, ops
from quire.config.options import choices_of
from quire.config.quantized import MADE_METHODS, METHODS
from quire.layers.embedding import Embedding, LearnedPositions, TiedHead, VocabEmbedding
from quire.layers.linear import Linear, Matrix, Place
from quire.ops.grouped import expand, pack_int4
from quire.ops.native.builder import ProgramBuilder, StepIndex
from quire.ops.native.library import levels
from quire.ops.native.matrix import PackedMatrix
from quire.ops.native.structs import Type
from quire.quantization.base import MatrixShape, QuantizationMethod, TensorForm, Unquantized
from quire.quantization.coded import MADE, Coded
from quire.quantization.packed import Packed, PackedParts, Packing
from quire.quantization.registry import select_formats

F32, BF16 = torch.float32, torch.bfloat16
PARTS = {"q_proj": 21, "k_proj": 5, "v_proj": 40}


def zeros(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled_linear(method: QuantizationMethod, dtype: torch.dtype, order: list[str]) -> Linear:
    layer = Linear(Place("attn.qkv_proj", method, dtype), 70, PARTS, bias=True)
    slots = list(layer.checkpoint_slots("attn.qkv_proj"))
    for part in order:
        for slot in slots:
            if slot.name.startswith(f"attn.{part}."):
                slot.load(draw(*slot.form.shape, dtype=dtype, seed=len(part) + slot.form.shape[0]))
    return layer


def packed(layer: Matrix) -> PackedMatrix:
    assert isinstance(layer.method, Packed)
    return layer.method.matrix(layer.weights, layer.shape)


def recorded(function: Any, *inputs: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """What a layer computes as a program."""
    builder = ProgramBuilder(inputs[0].dtype)
    program = builder.finish(function(*(builder.input(x.shape[1]) for x in inputs)))
    out = torch.empty(inputs[0].shape[0], width, dtype=dtype)
    program.run([*inputs, out])
    return out


def test_registry() -> None:
    types = {None: (Type.BF16, Type.BF16), "int8": (Type.I8, Type.I8), "int4": (Type.I4, Type.I8)}
    for name, expected in (types | {"w8a8": (Type.W8A8, Type.I8), "w4a8": (Type.W4A8, Type.I8)}).items():
        packed, plain = select_formats(name, Packing(BF16, zeros)), select_formats(name, None)
        for method, twin, type in zip(
            (packed.linear, packed.table), (plain.linear, plain.table), expected, strict=True
        ):
            assert isinstance(method, Packed)
            assert method.type == type
            assert isinstance(twin, Unquantized) if name is None else isinstance(twin, Coded)
            assert getattr(twin, "kind", None) == {Type.BF16: None, Type.I8: "int8", Type.I4: "int4"}.get(type, name)
    eight = select_formats("fp8", None, on_device=True)
    assert [getattr(method, "kind", None) for method in (eight.linear, eight.table)] == ["fp8", "int8"]
    assert isinstance(select_formats("fp8", None).linear, Unquantized)  # there it is what checkpoints are


def test_every_made_format_is_a_choice() -> None:
    """Of the option; but for those that the kernels don't have, which only a device makes."""
    assert list(MADE_METHODS) == [name for name, made in MADE.items() if made.packed is not None]
    assert set(MADE_METHODS + METHODS) < set(choices_of(get_type_hints(EngineArgs)["quantization"]))


def test_a_level_may_have_an_order_of_its_own() -> None:
    """Where activations are bfloat16; what no level is told for is good for all."""
    for made, dtype, level, type in (
        (None, BF16, "avx2", Type.BF16_INTS),
        (None, BF16, "", Type.BF16),
        (None, BF16, "amx", Type.BF16),
        (None, F32, "avx512_bf16", Type.F32),
        ("int8", BF16, "avx512_bf16", Type.W8A16),
        ("int8", BF16, "amx", Type.I8),
        ("int8", F32, "avx512_bf16", Type.I8),
        ("int4", BF16, "avx512_bf16", Type.I4),
    ):
        if level not in ("", *levels()):
            continue
        linear = select_formats(made, Packing(dtype, zeros, level=level)).linear
        assert isinstance(linear, Packed)
        assert linear.type is type


@pytest.mark.parametrize("made", [None, "int8", "int4", "w8a8", "w4a8"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_packed_layer_is_its_twin(level: str, dtype: torch.dtype, made: str | None) -> None:
    method = Packed(made, Packing(dtype, zeros))
    twin = filled_linear(Unquantized() if made is None else Coded(made), dtype, ["q_proj", "k_proj", "v_proj"])
    layer = filled_linear(method, dtype, ["v_proj", "q_proj", "k_proj"])
    x = draw(37, 70, dtype=dtype, seed=9)
    found = recorded(layer, x, width=66, dtype=dtype)
    assert torch.equal(layer.weights["bias"], twin.weights["bias"])
    bound = {F32: 2e-5, BF16: 0.1}[dtype] if made != "int4" else {F32: 5e-3, BF16: 0.15}[dtype]
    torch.testing.assert_close(found, twin(x), atol=bound, rtol=bound)
    wide = recorded(lambda v: layer(v, wide=True), x, width=66, dtype=F32)
    torch.testing.assert_close(wide, twin(x).float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("made", ["int8", "int4", "fp8", "w8a8", "w4a8"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_twin_is_near_what_it_was_given(made: str, dtype: torch.dtype) -> None:
    method, shape = Coded(made), MatrixShape(100, 2500, bias=True)  # more rows than are expanded at once
    weights, dense, bias = method.create_weights(shape, dtype), draw(2500, 100), draw(2500, seed=1)
    for start, stop in ((1100, 2500), (0, 7), (7, 1100)):
        method.load(weights, shape, dense[start:stop], start)
    weights["bias"].copy_(bias)
    if made == "int4":  # two a byte, in whole pairs of groups
        assert (weights["codes"].dtype, weights["codes"].shape) == (torch.uint8, (2500, 64))
    else:
        assert weights["codes"].dtype == (torch.float8_e4m3fn if made == "fp8" else torch.int8)
        assert weights["codes"].float().abs().amax() == {"fp8": 448, "w4a8": 120}.get(made, 127)
    assert weights["scales"].shape == (2500, 1 if made != "int4" else 4)
    x = draw(70, 100, dtype=dtype, seed=2)
    found = method.apply(weights, shape, x)
    assert found.dtype == dtype
    expected = x.float() @ dense.t() + bias
    error = (found.float() - expected).square().mean().sqrt() / expected.std()
    assert error < {"int4": 0.1, "w4a8": 0.1, "fp8": 0.03}.get(made, 0.01)
    assert method.apply(weights, shape, x, wide=True).dtype in (F32, dtype)
    for rows in (1, 33):
        assert torch.equal(method.apply(weights, shape, x[5 : 5 + rows]), found[5 : 5 + rows])
    ids = torch.tensor([2499, 0, 3])
    rows = method.lookup(weights, shape, ids, dtype)
    assert rows.dtype == dtype
    assert (rows.float() - dense[ids]).abs().max() < {"int4": 0.6, "w4a8": 0.6, "fp8": 0.2}.get(made, 0.03)


@pytest.mark.parametrize("num_columns", [1, 32, 40, 64, 100])
def test_four_bits_are_packed_in_pairs(num_columns: int) -> None:
    codes = (torch.arange(3 * num_columns).view(3, -1) % 16 - 8).to(torch.int8)
    packed = pack_int4(codes)
    assert packed.shape == (3, -(-num_columns // 64) * 32)
    groups = -(-num_columns // 32)
    assert torch.equal(expand(packed, torch.ones(3, groups), None, num_columns), codes.float())
    scales = torch.arange(1.0, groups + 1.0).expand(3, -1)
    assert torch.equal(expand(packed, scales, None, num_columns)[:, -1], codes[:, -1] * float(groups))


@pytest.mark.parametrize("made", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_packed_table_is_looked_up_and_multiplied(level: str, dtype: torch.dtype, made: str | None) -> None:
    plain = Unquantized() if made is None else Coded(made)
    pair = [VocabEmbedding(Place("", m, dtype), 50, 40) for m in (Packed(made, Packing(dtype, zeros)), plain)]
    for embedding in pair:
        [slot] = embedding.checkpoint_slots("")
        slot.load(draw(50, 40, dtype=dtype))
    hidden = draw(9, 40, dtype=dtype, seed=4)
    found = recorded(lambda v: TiedHead(pair[0])(v, wide=True), hidden, width=50, dtype=F32)
    torch.testing.assert_close(found, TiedHead(pair[1])(hidden).float(), atol=0.1, rtol=0.1)
    matrix = unpacked(packed(pair[0]))
    torch.testing.assert_close(matrix.to(dtype), pair[1](torch.arange(50)), atol=0, rtol=0.01)


@pytest.mark.parametrize("made", [None, "int8"])
def test_positions_are_offset_in_every_format(level: str, made: str | None) -> None:
    twin = Unquantized() if made is None else Coded(made)
    native, plain = (
        LearnedPositions(Place("", m, F32), 9, 40, offset=2) for m in (Packed(made, Packing(F32, zeros)), twin)
    )
    for layer in (native, plain):
        [slot] = layer.checkpoint_slots("")
        slot.load(draw(11, 40))
    index: Any = StepIndex(ProgramBuilder(F32), by_position=True)
    value: Any = native(index)
    [step] = value.builder._steps
    assert (step.spec.offset, step.spec.by_position) == (2, 1)
    rows = unpacked(packed(native))
    assert torch.equal(plain(torch.arange(9)), rows[2:])


def test_a_layer_in_blocks_is_kept_as_the_file_has_it(level: str) -> None:
    """Its parts are loaded as bytes, and it computes what a matrix of their values does."""
    gguf = pytest.importorskip("gguf")
    parts = {"q_proj": 21, "k_proj": 5, "v_proj": 38}
    layer = Linear(Place("attn.qkv_proj", Packed(None, Packing(BF16, zeros), kept=Type.Q4_0), BF16), 96, parts)
    plain = Linear(Place("attn.qkv_proj", Packed(None, Packing(BF16, zeros)), BF16), 96, parts)
    slots = {slot.name: slot for slot in plain.checkpoint_slots("attn.qkv_proj")}
    for slot in reversed(list(layer.checkpoint_slots("attn.qkv_proj"))):
        rows = slot.form.shape[0]
        assert slot.form == TensorForm((rows, 54), (torch.uint8,), rows * 96)
        blocks = gguf.quants.quantize(draw(rows, 96, seed=rows).numpy(), gguf.GGMLQuantizationType.Q4_0)
        slot.load(torch.from_numpy(blocks))
        slots[slot.name].load(torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)))
    x = draw(9, 96, dtype=BF16)
    assert torch.equal(*(recorded(one, x, width=64, dtype=BF16) for one in (layer, plain)))


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_0", "Q8_0"), ("Q5_1", "BF16", "Q5_1")])
def test_parts_of_several_types_are_products_side_by_side(level: str, kinds: tuple[str, ...]) -> None:
    gguf = pytest.importorskip("gguf")
    methods = {
        part: Packed(None, Packing(BF16, zeros), kept=None if kind == "BF16" else Type[kind])
        for kind, part in zip(kinds, PARTS, strict=True)
    }
    methods["k_proj"] = methods["q_proj"] if kinds[0] == kinds[1] else methods["k_proj"]
    layer = Linear(Place("attn.qkv_proj", PackedParts(methods), BF16), 96, PARTS, bias=True)
    plain = Linear(Place("attn.qkv_proj", Packed(None, Packing(BF16, zeros)), BF16), 96, PARTS, bias=True)
    slots = {slot.name: slot for slot in plain.checkpoint_slots("attn.qkv_proj")}
    for slot in reversed(list(layer.checkpoint_slots("attn.qkv_proj"))):
        values = draw(slots[slot.name].form.shape[0], 96, seed=3) if "weight" in slot.name else draw(slot.form.shape[0])
        if slot.form.dtypes == (torch.uint8,):
            kind = gguf.GGMLQuantizationType[methods[slot.name.split(".")[1]].type.name]
            blocks = gguf.quants.quantize(values.numpy(), kind)
            slot.load(torch.from_numpy(blocks))
            values = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
        else:
            slot.load(values)
        slots[slot.name].load(values)
    x = draw(9, 96, dtype=BF16)
    assert torch.equal(*(recorded(one, x, width=66, dtype=BF16) for one in (layer, plain)))
    gated = [recorded(lambda v, one=one: ops.silu_and_mul(one(v)), x, width=33, dtype=BF16) for one in (layer, plain)]
    assert torch.equal(*gated), "what follows is not fused into the last of them"


def test_each_matrix_of_a_checkpoint_in_blocks_has_its_own_type() -> None:
    kinds = {"attn.q": "Q4_K", "attn.k": "Q4_K", "attn.v": "Q6_K", "mlp.gate": "Q4_K", "mlp.up": "Q4_K", "norm": "F32"}
    formats = select_formats(None, Packing(BF16, zeros), blocks=kinds | {"embed": "Q6_K", "odd": "TQ1_0"})

    def type_of(name: str, *parts: str, table: bool = False) -> Type:
        method = formats.method_for(name, parts=parts, table=table)
        assert isinstance(method, Packed)
        return method.type

    merged = formats.method_for("attn.qkv", parts=("q", "k", "v"))
    assert isinstance(merged, PackedParts)
    assert merged.of_part("v") is formats.method_for("attn.v")
    assert type_of("mlp.gate_up", "gate", "up") is Type.Q4_K
    assert type_of("attn.v") is type_of("embed", table=True) is Type.Q6_K
    assert type_of("odd") is type_of("norm") is type_of("not in the file") is Type.BF16
    without = select_formats(None, None, blocks=kinds)
    assert isinstance(without.method_for("attn.v"), Unquantized)


def test_what_an_earlier_start_packed_is_said_to_be_there() -> None:
    assert Packed("int8", Packing(F32, zeros)).filled == frozenset()
    assert Packed("int8", Packing(F32, zeros, filled=True)).filled == {"weight"}, "a bias is never kept"
    assert Unquantized().filled == Coded("int4").filled == frozenset()


def test_packed_weights_are_for_programs_only(level: str) -> None:
    layer = Linear(Place("", Packed(None, Packing(F32, zeros)), F32), 8, 3)
    with pytest.raises(AssertionError, match="recorded programs only"):
        layer(torch.ones(2, 8))
    with pytest.raises(AssertionError, match="recorded programs only"):
        Embedding(Place("", Packed("int8", Packing(F32, zeros)), F32), 3, 8)(torch.tensor([1]))
