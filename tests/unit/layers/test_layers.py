"""Layers: what each computes, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.errors import ModelLoadError
from quire.layers.attention import Attention, HeadLayout, SelfAttention
from quire.layers.embedding import LearnedPositions, TiedHead, VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.rotary import RopeParameters, RotaryEmbedding
from quire.quantization.base import MatrixShape
from quire.quantization.unquantized import Unquantized

F32 = torch.float32
METHOD = Unquantized()


def linear(inputs: int, outputs: Any, bias: bool = False) -> Linear:
    layer = Linear(inputs, outputs, bias=bias, method=METHOD, dtype=F32)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def test_merged_linear_is_its_parts_side_by_side() -> None:
    merged = Linear(4, {"a": 3, "b": 2}, bias=True, method=METHOD, dtype=F32)
    parts = {"a": linear(4, 3, bias=True), "b": linear(4, 2, bias=True)}
    for name, start, shapes in merged.checkpoint_parts():
        assert shapes == {"weight": (merged.parts[name], 4), "bias": (merged.parts[name],)}
        for tensor in shapes:
            merged.load(tensor, start, parts[name].weights[tensor])
    x = torch.randn(5, 4)
    assert torch.equal(merged(x), torch.cat([part(x) for part in parts.values()], -1))
    assert merged.shape == MatrixShape(4, 5, bias=True)
    assert not any(p.requires_grad for p in merged.parameters())


class RecordingBackend(AttentionBackend[str]):
    """Remembers what it is asked, and answers with the queries."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.asked: list[Any] = []

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks,)

    def build(self, batch: Any) -> str:
        return "step"

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: str) -> None:
        self.written.append((key, value, kv_cache, metadata))

    def forward(
        self, query: Tensor, kv_cache: Tensor, metadata: str, scale: float, sliding_window: int | None
    ) -> Tensor:
        self.asked.append((kv_cache, metadata, scale, sliding_window))
        return query


def test_self_attention_splits_norms_and_rotates() -> None:
    backend = RecordingBackend()
    caches = [torch.zeros(1), torch.ones(1)]
    rotary = RotaryEmbedding(RopeParameters(4, {"rope_type": "default", "rope_theta": 100.0}, 16, 16))
    q_norm, k_norm = RMSNorm(4, 1e-6, F32), RMSNorm(4, 1e-6, F32)
    q_norm.weight.fill_(2.0)
    k_norm.weight.fill_(3.0)
    attention = Attention(backend, 1, HeadLayout(2, 1, 4), sliding_window=9)
    block = SelfAttention(attention, linear(8, 16), linear(8, 8), rotary, q_norm, k_norm)
    x, positions = torch.randn(3, 8), torch.tensor([0, 5, 2])
    out = block(x, positions, caches, "step")
    qkv = block.qkv_proj(x).view(3, 4, 4)
    query, key = rotary(q_norm(qkv[:, :2]), k_norm(qkv[:, 2:3]), positions)
    [(written_key, written_value, cache, metadata)] = backend.written
    assert torch.equal(written_key, key)
    assert torch.equal(written_value, qkv[:, 3:])
    assert cache is caches[1]
    assert metadata == "step"
    assert backend.asked == [(caches[1], "step", 0.5, 9)]
    assert torch.equal(out, block.o_proj(query.flatten(1)))


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
    embedding, weight = VocabEmbedding(11, 4, METHOD, F32), torch.randn(11, 4)
    embedding.load("weight", weight)
    head = TiedHead(embedding)
    hidden = torch.randn(3, 4)
    torch.testing.assert_close(head(hidden), hidden @ weight.t())
    embedding.weights["weight"].zero_()
    assert not head(hidden).any()


def test_learned_positions_with_offset() -> None:
    positions, weight = LearnedPositions(5, 3, METHOD, F32, offset=2), torch.arange(21.0).view(7, 3)
    positions.load("weight", weight)
    assert torch.equal(positions(torch.tensor([0, 4])), weight[[2, 6]])


def test_mlps() -> None:
    gated = GatedMLP(4, 6, activation="silu", bias=False, method=METHOD, dtype=F32)
    plain = MLP(4, 6, activation="relu", bias=True, method=METHOD, dtype=F32)
    for parameter in (*gated.parameters(), *plain.parameters()):
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 4)
    gate, up = (x @ gated.gate_up_proj.weights["weight"].t()).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ gated.down_proj.weights["weight"].t()
    torch.testing.assert_close(gated(x), expected)
    torch.testing.assert_close(plain(x), plain.fc2(plain.fc1(x).clamp(min=0)))


def test_unknown_activations_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="'gelu' is not supported in a gated MLP"):
        GatedMLP(4, 6, activation="gelu", bias=False, method=METHOD, dtype=F32)
    with pytest.raises(ModelLoadError, match="'mish' is not supported; supported are relu"):
        MLP(4, 6, activation="mish", bias=False, method=METHOD, dtype=F32)


def test_rope_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ModelLoadError, match="'longrope' is not supported; supported are default, linear"):
        RotaryEmbedding(RopeParameters(4, {"rope_type": "longrope", "rope_theta": 1e4}, 16, 16))
    with pytest.raises(ModelLoadError, match="'linear' lack 'factor'"):
        RotaryEmbedding(RopeParameters(4, {"rope_type": "linear", "rope_theta": 1e4, "factor": None}, 16, 16))


def test_rotation_depends_on_distance_alone() -> None:
    rotary = RotaryEmbedding(RopeParameters(8, {"rope_type": "default", "rope_theta": 100.0}, 64, 64))
    query, key = torch.randn(1, 1, 8).expand(3, 1, 8), torch.randn(1, 1, 8).expand(3, 1, 8)
    rotated_query, _ = rotary(query, key, torch.tensor([5, 25, 45]))
    _, rotated_key = rotary(query, key, torch.tensor([2, 22, 42]))
    products = (rotated_query * rotated_key).sum(-1)
    torch.testing.assert_close(products, products[:1].expand(3, 1), atol=1e-5, rtol=1e-5)
