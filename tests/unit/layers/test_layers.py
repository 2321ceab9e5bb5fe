"""Layers: what each computes, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.attention.base import AttentionBackend, AttentionSpec
from quire.attention.step import Step
from quire.errors import ModelLoadError
from quire.layers.attention import SelfAttention
from quire.layers.embedding import LearnedPositions, TiedHead, VocabEmbedding
from quire.layers.linear import Linear, Place, Shard
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rotary import RopeParameters, rope_table
from quire.quantization.base import MatrixShape, Unquantized

F32 = torch.float32
PLACE = Place("", Unquantized(), F32)
STEP = Step(torch.arange(3))


def linear(inputs: int, outputs: Any, bias: bool = False) -> Linear:
    layer = Linear(PLACE, inputs, outputs, bias=bias)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def test_merged_linear_is_its_parts_side_by_side() -> None:
    merged = Linear(PLACE, 4, {"a": 3, "b": 2}, bias=True)
    parts = {"a": linear(4, 3, bias=True), "b": linear(4, 2, bias=True)}
    for slot in merged.checkpoint_slots("x.ab"):
        _, name, tensor = slot.name.split(".")
        assert slot.form.shape == ((merged.parts[name], 4) if tensor == "weight" else (merged.parts[name],))
        parts[name].weights[tensor].mul_(8).round_()  # small integers: a sum's order can't show
        slot.load(parts[name].weights[tensor])
    x = torch.randint(-8, 8, (5, 4)).float()
    assert torch.equal(merged(x), torch.cat([part(x) for part in parts.values()], -1))
    assert merged.shape == MatrixShape(4, 5, bias=True)
    assert not any(p.requires_grad for p in merged.parameters())


class RecordingBackend(AttentionBackend):
    """Remembers what it is asked, and answers with the queries."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks,)

    def build(self, batch: Any) -> str:
        return "step"

    def attend(self, qkv: Tensor, spec: AttentionSpec, step: Step) -> Tensor:
        self.asked.append((qkv, spec, step))
        return qkv[:, : spec.num_heads * spec.head_dim]

    def move_slots(self, *_: Any) -> None:
        raise NotImplementedError


def test_self_attention_projects_around_one_call() -> None:
    backend, spec = RecordingBackend(), AttentionSpec(2, 1, 4, 0.5, window=9, layer=1)
    block = SelfAttention(backend, spec, linear(8, 16), linear(8, 8))
    x, step = torch.randn(3, 8), Step(torch.tensor([0, 5, 2]))
    out = block(x, step)
    [(qkv, asked, given)] = backend.asked
    assert torch.equal(qkv, block.qkv_proj(x))
    assert asked is spec
    assert given is step
    assert torch.equal(out, block.o_proj(qkv[:, :8]))


def test_norms_along_the_residual_stream() -> None:
    rms, layer = RMSNorm(6, 1e-6, F32), LayerNorm(6, 1e-5, F32, affine=False)
    rms.weight.fill_(1.5)
    x, residual = torch.randn(2, 6), torch.randn(2, 6)
    for norm in (rms, layer):
        out, stream = norm.add(x, None)
        assert torch.equal(out, norm(x))
        assert stream is x
        out, stream = norm.add(x, residual)
        assert torch.equal(stream, x + residual)
        assert torch.equal(out, norm(stream))
    assert not list(layer.parameters())


def test_tied_head_shares_the_embedding() -> None:
    embedding, weight = VocabEmbedding(PLACE, 11, 4), torch.randn(11, 4)
    [slot] = embedding.checkpoint_slots("")
    slot.load(weight)
    head = TiedHead(embedding)
    hidden = torch.randn(3, 4)
    torch.testing.assert_close(head(hidden), hidden @ weight.t())
    embedding.weights["weight"].zero_()
    assert not head(hidden).any()


def test_learned_positions_with_offset() -> None:
    positions, weight = LearnedPositions(PLACE, 5, 3, offset=2), torch.arange(21.0).view(7, 3)
    [slot] = positions.checkpoint_slots("")
    slot.load(weight)
    assert torch.equal(positions(torch.tensor([0, 4])), weight[[2, 6]])


def test_mlps() -> None:
    gated = GatedMLP(linear(4, {"gate_proj": 6, "up_proj": 6}), linear(6, 4), "silu")
    plain = MLP(linear(4, 6, bias=True), linear(6, 4, bias=True), "relu")
    x = torch.randn(3, 4)
    gate, up = (x @ gated.gate_up_proj.weights["weight"].t()).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ gated.down_proj.weights["weight"].t()
    torch.testing.assert_close(gated(x, STEP), expected)
    torch.testing.assert_close(plain(x, STEP), plain.fc2(plain.fc1(x).clamp(min=0)))


def test_a_gate_comes_after_what_adapters_and_ranks_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation makes a product and its gate only where nothing is between the two."""
    fused: list[Tensor] = []
    operation = ops.gated_linear

    def gated_linear(x: Tensor, *operands: Any) -> Tensor:
        fused.append(x)
        return operation(x, *operands)

    monkeypatch.setattr(ops, "gated_linear", gated_linear)
    monkeypatch.setattr(ops, "lora", lambda x, y, *rest: y + 1)
    monkeypatch.setattr(ops, "gather", lambda y, *rest: y + 2)
    layer, x = linear(4, 12, bias=True), torch.randn(3, 4)
    product = layer(x)
    assert torch.equal(layer(x, gate=ops.gelu_and_mul), ops.gelu_and_mul(product))
    assert len(fused) == 1
    own: Any = object()
    layer.shard = Shard(own, {})
    assert torch.equal(layer(x, gate=ops.silu_and_mul), ops.silu_and_mul(product))
    assert len(fused) == 2
    layer.shard = Shard(own, {}, outputs=(0, 6, 12))
    assert torch.equal(layer(x, gate=ops.silu_and_mul), ops.silu_and_mul(product + 2))
    layer.shard, layer.lora = None, own
    assert torch.equal(layer(x, gate=ops.silu_and_mul), ops.silu_and_mul(product + 1))
    assert len(fused) == 2


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="'relu' is not supported in a gated MLP; supported are silu"):
        GatedMLP(linear(4, 12), linear(6, 4), "relu")
    with pytest.raises(ModelLoadError, match="'mish' is not supported; supported are relu"):
        MLP(linear(4, 6), linear(6, 4), "mish")


def test_rope_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ModelLoadError, match="'proportional' is not supported; supported are default, linear"):
        rope_table(RopeParameters(4, {"rope_type": "proportional", "rope_theta": 1e4}, 16, 16))
    for values in ({"short_factor": [1.0]}, {"short_factor": 2.0, "long_factor": [1.0, 2.0]}):
        with pytest.raises(ModelLoadError, match=r"has short_factor = .*; it must be 2 numbers"):
            rope_table(RopeParameters(4, {"rope_type": "longrope", "rope_theta": 1e4} | values, 16, 16))
    with pytest.raises(ModelLoadError, match="give no angles"):
        rope_table(RopeParameters(4, {"rope_type": "longrope", "rope_theta": 1e4}, 16, 16))
    with pytest.raises(ModelLoadError, match="'linear' lack 'factor'"):
        rope_table(RopeParameters(4, {"rope_type": "linear", "rope_theta": 1e4, "factor": None}, 16, 16))
    with pytest.raises(ModelLoadError, match=r"'factors': 'x'.* give no angles \(new.*invalid data type 'str'\)"):
        rope_table(RopeParameters(4, {"rope_type": "default", "rope_theta": 1e4, "factors": "x"}, 16, 16))


def test_rotation_depends_on_distance_alone() -> None:
    table = rope_table(RopeParameters(8, {"rope_type": "default", "rope_theta": 100.0}, 64, 64))
    query, key = torch.randn(1, 1, 8).expand(3, 1, 8), torch.randn(1, 1, 8).expand(3, 1, 8)
    rotated_query, _ = ops.rotary(query, key, torch.tensor([5, 25, 45]), table)
    _, rotated_key = ops.rotary(query, key, torch.tensor([2, 22, 42]), table)
    products = (rotated_query * rotated_key).sum(-1)
    torch.testing.assert_close(products, products[:1].expand(3, 1), atol=1e-5, rtol=1e-5)
