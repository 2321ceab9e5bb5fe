"""The decoder that all families compose: embeddings, pre-norm layers along a residual stream, a final norm.

A family's file decides what norm, attention and MLP are; this is only the order in which they meet.
"""

from typing import Any

from torch import Tensor, nn

from quire.layers.attention import SelfAttention
from quire.layers.embedding import LearnedPositions, VocabEmbedding
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.norm import Norm


class DecoderLayer(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``.

    Each addition is fused with the norm after it, so a layer takes and returns the pair (latest contribution,
    residual stream without it).
    """

    def __init__(
        self, input_layernorm: Norm, self_attn: SelfAttention, post_attention_layernorm: Norm, mlp: MLP | GatedMLP
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, kv_caches: list[Tensor], metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """x and residual [T, H] (None before the first layer) -> the same pair."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, positions, kv_caches, metadata)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Token ids and positions [T] -> hidden states [T, H]."""

    def __init__(
        self,
        embed_tokens: VocabEmbedding,
        layers: list[DecoderLayer],
        norm: Norm,
        embed_positions: LearnedPositions | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.embed_positions = embed_positions
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], metadata: Any) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, positions, kv_caches, metadata)
        return self.norm.add(x, residual)[0]
