"""The decoder that all families compose: embeddings, pre-norm layers along a residual stream, a final norm.

A family's file decides what norm, attention and MLP are; this is only the order in which they meet.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

from quire import ops
from quire.attention.step import Step
from quire.layers.attention import SelfAttention
from quire.layers.embedding import LearnedPositions, VocabEmbedding
from quire.layers.linear import Linear
from quire.layers.norm import Norm


class DecoderLayer(nn.Module):
    """``x += scale * attention(norm(x)); x += scale * mlp(norm(x))``, most often without a scale.

    Each addition is fused with the norm after it, so a layer takes and returns the pair (latest contribution,
    residual stream without it).
    """

    def __init__(
        self,
        input_layernorm: Norm,
        self_attn: SelfAttention,
        post_attention_layernorm: Norm,
        mlp: nn.Module,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.post_attention_layernorm, self.mlp, self.scale = post_attention_layernorm, mlp, scale

    def forward(self, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """x and residual [T, H] (None before the first layer) -> the same pair."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self._scaled(self.self_attn(x, step)), residual)
        return self._scaled(self.mlp(x, step)), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale is None else ops.scale(x, self.scale)


class SandwichLayer(DecoderLayer):
    """``x += norm(attention(norm(x))); x += norm(mlp(norm(x)))``, along a residual stream as `DecoderLayer`."""

    def __init__(self, norms: Sequence[Norm], self_attn: SelfAttention, mlp: nn.Module) -> None:
        """`norms`: the four of them, in the order in which they are applied."""
        before_attention, after_attention, before_mlp, after_mlp = norms
        super().__init__(before_attention, self_attn, after_attention, mlp)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = before_mlp, after_mlp

    def forward(self, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """x and residual [T, H] (None before the first layer) -> the same pair."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, step))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x, step)), residual


class Through(Norm):
    """Stands where there is no norm."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class ParallelLayer(DecoderLayer):
    """``x += attention(norm(x)) + mlp(norm(x))``, along a residual stream as `DecoderLayer`; it has one norm."""

    def forward(self, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """x and residual [T, H] (None before the first layer) -> the same pair."""
        x, residual = self.input_layernorm.add(x, residual)
        attended = self.self_attn(x, step)
        return ops.add(self.mlp(x, step), attended), residual


class PostNormLayer(DecoderLayer):
    """``x = norm(x + attention(x)); x = norm(x + mlp(x))``: there is no residual stream beside x."""

    def forward(self, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, None]:
        """x [T, H] -> [T, H]; takes and returns no residual."""
        x, _ = self.input_layernorm.add(self.self_attn(x, step), x)
        x, _ = self.post_attention_layernorm.add(self.mlp(x, step), x)
        return x, None


# Where norms stand, to what blocks compute; "beside": before both of them at once; "of sums": after what each adds to.
NormOrder = Literal["before", "around", "after", "beside", "of sums"]


def decoder_layer(
    order: NormOrder, norm: Callable[[], Norm], self_attn: SelfAttention, mlp: nn.Module, scale: float | None = None
) -> DecoderLayer:
    """A layer with its norms where `order` says; `norm` makes one, `scale` is for those that stand before alone."""
    if order == "before":
        return DecoderLayer(norm(), self_attn, norm(), mlp, scale)
    if order == "of sums":
        return PostNormLayer(norm(), self_attn, norm(), mlp)
    if order == "beside":
        return ParallelLayer(norm(), self_attn, Through(), mlp)
    before = norm if order == "around" else Through
    return SandwichLayer((before(), norm(), before(), norm()), self_attn, mlp)


class Decoder(nn.Module):
    """Token ids and positions [T] -> hidden states [T, H], or [T, E] where embeddings have a size E of their own.

    Args:
        layers: as `DecoderLayer` takes and returns its tensors.
        norm: the last; None where layers end with one.
        embed_scale: factor on token embeddings.
        projections: from the size of embeddings to that of the layers, and back, where they differ.
    """

    def __init__(
        self,
        embed_tokens: VocabEmbedding,
        layers: Sequence[nn.Module],
        norm: Norm | None,
        embed_positions: LearnedPositions | None = None,
        embed_scale: float | None = None,
        projections: tuple[Linear, Linear] | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = embed_tokens, embed_positions
        self.embed_scale = embed_scale
        self.project_in, self.project_out = projections or (None, None)
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, input_ids: Tensor, step: Step) -> Tensor:
        return self.run_layers(self.embed(input_ids, step) if step.incoming is None else step.incoming, step)

    def embed(self, input_ids: Tensor, step: Step) -> Tensor:
        """Token ids [T] -> what enters the first layer, [T, H]."""
        x: Tensor = self.embed_tokens(input_ids, step)
        if self.project_in is not None:
            x = self.project_in(x, step)
        if self.embed_scale is not None:
            x = ops.scale(x, self.embed_scale)
        return x if self.embed_positions is None else x + self.embed_positions(step.positions, step)

    def run_layers(self, x: Tensor, step: Step) -> Tensor:
        """All layers, with the taps filled on the way, and what follows them: [T, H] -> [T, H], or [T, E]."""
        residual: Tensor | None = None
        for i, layer in enumerate(self.layers):
            x, residual = layer(x, residual, step)
            if step.taps is not None and i in step.taps.layers:
                x, residual = (x if residual is None else x + residual), None
                step.taps.hidden.append(x)
        if self.norm is not None:
            x = self.norm.add(x, residual)[0]
        elif residual is not None:
            x = x + residual
        return x if self.project_out is None else self.project_out(x, step)
