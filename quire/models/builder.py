"""Makes a model's layers, each under its own name.

`quire.models.llama.build_llama` is given one and asks it for every layer. From the name follow the weight format, the
key under which packed weights are kept and the LoRA target; attention layers are numbered here, and what they keep of a
token is noted, by which the KV cache is laid out. Must not know any family, nor a checkpoint's spelling of the names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quire.attention.base import AttentionBackend, AttentionSpec
from quire.attention.step import Step
from quire.config.worker import Stage
from quire.layers.attention import SelfAttention
from quire.layers.embedding import LearnedPositions, TiedHead, VocabEmbedding
from quire.layers.linear import Linear, Place, Shard
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.moe import MixtureOfExperts, Routing
from quire.layers.norm import LayerNorm, RMSNorm
from quire.models.joined import JoinedLinear
from quire.models.sharding import Sharding
from quire.models.whole_norms import WholeNormAttention
from quire.protocol.cache import CacheGroup, LayerCache, group_layers
from quire.quantization.base import MatrixShape, TensorForm, Unquantized
from quire.quantization.registry import WeightFormats


@dataclass(frozen=True)
class BuildContext:
    """What all layers of a model are built with, and what they leave behind.

    Attributes:
        dtype: of activations and vectors.
        sharding: what this rank has of each layer.
        stage: which layers it has; None for all.
        has_table: it has the token embedding.
        cache_layers: what each attention layer keeps of a token, in the order of the step's caches.
    """

    backend: AttentionBackend
    formats: WeightFormats
    dtype: torch.dtype
    sharding: Sharding = field(default_factory=Sharding)
    stage: Stage | None = None
    has_table: bool = True
    cache_layers: list[LayerCache] = field(default_factory=list)
    attentions: list[SelfAttention] = field(default_factory=list)

    def assign_groups(self, groups: list[CacheGroup] | None = None, first: int = 0) -> None:
        """Tell each attention layer its KV group; the last thing that is done to a model's layers.

        Where others' layers count, too (a draft model's, other stages'), `groups` are all; this one's begin at `first`.
        """
        for number, group in enumerate(groups or group_layers(self.cache_layers)):
            for layer in group.layers:
                if 0 <= layer - first < len(self.attentions):
                    attention = self.attentions[layer - first]
                    attention.spec = replace(attention.spec, group=number)


@dataclass(frozen=True)
class AttentionForm:
    """What attention blocks differ in, besides their spec.

    Attributes:
        qkv_bias, output_bias: whether the projections have a bias.
        head_norms: RMSNorm over each head of queries and keys, before the rotation, as the spec's eps says.
        fused: checkpoints hold queries, keys and values as one matrix.
        sinks: whether each head has a score of one more key, without a value.
        interleaved: checkpoints have features that rotate together side by side, and not half a head's apart.
        whole_norms: RMSNorm over all heads of queries together, and of keys, in place of `head_norms`.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    fused: bool = False
    sinks: bool = False
    interleaved: bool = False
    whole_norms: bool = False


class _Elsewhere(Unquantized):
    """The weights of what another stage of the model computes: there are none here, and nothing multiplies with them.

    A checkpoint has none of their tensors for this stage, and so there are no parameters.
    """

    def checkpoint_tensors(self, shape: MatrixShape) -> dict[str, TensorForm]:
        return {}


class _PassedBy(nn.Module):
    """In the place of a layer of another stage."""

    def forward(self, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor | None]:
        return x, residual


class Builder:
    """Makes the layers below one name.

    Args:
        prefix: the name; "" for the model itself.
        here: what it makes has weights; where not, another stage has them.
    """

    def __init__(self, context: BuildContext, prefix: str = "", here: bool = True) -> None:
        self.context, self.prefix, self.here = context, prefix, here

    def name(self, name: str) -> str:
        """The full name of a layer."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def child(self, name: str) -> "Builder":
        """The builder of what stands below a layer."""
        return Builder(self.context, self.name(name))

    @property
    def first(self) -> "Builder":
        """The builder of what stands before all layers."""
        return Builder(self.context, self.prefix, self.context.stage is None or self.context.stage.is_first)

    @property
    def last(self) -> "Builder":
        """The builder of what stands after all layers."""
        return Builder(self.context, self.prefix, self.context.stage is None or self.context.stage.is_last)

    def layers(self, count: int, make: "Callable[[int, Builder], nn.Module]") -> list[nn.Module]:
        """A stack of `count` layers, of which those of other stages hand on what they are given."""
        stage = self.context.stage
        here = range(count) if stage is None else stage.layers
        return [make(i, self.child(f"layers.{i}")) if i in here else _PassedBy() for i in range(count)]

    def linear(
        self,
        name: str,
        in_features: int,
        outputs: int | Mapping[str, int],
        *,
        bias: bool = False,
        shard: Shard | None = None,
        rows: Mapping[str, Sequence[range]] | None = None,
        plain: bool = False,
    ) -> Linear:
        """A linear layer, or one merged of `outputs` by part: see `Linear`, `Place`. Never quantized if `plain`."""
        parts = tuple(outputs) if isinstance(outputs, Mapping) else ()
        place = replace(self._place(name, parts=parts), shard=shard, rows=rows)
        cut = shard is not None and shard.columns is not None and self.context.formats.blocks  # rows' blocks stay whole
        if plain or cut:
            place = replace(place, method=self.context.formats.plain)
        return Linear(place, in_features, outputs, bias=bias)

    def joined(
        self, name: str, in_features: Sequence[int], outputs: int | Mapping[str, int], *, bias: bool = False
    ) -> JoinedLinear:
        """A linear layer on inputs of several sizes side by side; see `linear`."""
        sizes = enumerate(in_features)
        return JoinedLinear([self.linear(f"{name}.{i}", size, outputs, bias=bias and not i) for i, size in sizes])

    def embedding(self, name: str, num_rows: int, size: int) -> VocabEmbedding:
        """A table of vectors by token id."""
        place = Builder(self.context, self.prefix, self.context.has_table)._place(name, table=True)
        return VocabEmbedding(replace(place, shard=self.context.sharding.gathered(num_rows)), num_rows, size)

    def positions(self, name: str, num_positions: int, size: int, offset: int = 0) -> LearnedPositions:
        """A table of vectors by position; that of position 0 is row `offset`."""
        return LearnedPositions(self._place(name, table=True), num_positions, size, offset)

    def head(self, embedding: VocabEmbedding, *, tied: bool, num_labels: int = 0) -> Linear | TiedHead:
        """The output head for the vocabulary of an embedding; with its very weights where `tied`. Or for classes."""
        if num_labels:
            return self.last.linear("lm_head", embedding.shape.in_features, num_labels, plain=True)
        if tied:
            return TiedHead(embedding)
        size, num_rows = embedding.shape.in_features, embedding.parts[""]
        return Linear(replace(self.last._place("lm_head", table=True), shard=embedding.shard), size, num_rows)

    def rms_norm(self, size: int, eps: float, *, plus_one: bool = False) -> RMSNorm:
        """An RMSNorm, that multiplies by 1 + weight where `plus_one`."""
        return RMSNorm(size, eps, self.context.dtype, plus_one)

    def layer_norm(self, size: int, eps: float, *, affine: bool = True, bias: bool = True) -> LayerNorm:
        """A LayerNorm, with weight and bias, or without this, where `affine`."""
        return LayerNorm(size, eps, self.context.dtype, affine, bias)

    def attention(self, size: int | Sequence[int], spec: AttentionSpec, form: AttentionForm) -> SelfAttention:
        """An attention block on hidden states of `size`; this builder's name is the block's.

        Args:
            size: or sizes, of several hidden states side by side, the last of which is that of what comes out.
            spec: without layer, group and norms, which are filled in here.
        """
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        spec = replace(spec, layer=len(self.context.cache_layers))
        if form.whole_norms:
            assert isinstance(size, int)
            return self._note(self._whole_norm_attention(size, spec, form))
        outputs = sum(parts.values()) if form.fused else parts
        q_norm, k_norm = (self.rms_norm(spec.head_dim, spec.norm_eps) if form.head_norms else None for _ in "qk")
        norms = {"q_norm": q_norm and q_norm.weight, "k_norm": k_norm and k_norm.weight}
        # In float32 whatever the model's type, as kernels read them: what is loaded later is seen by all.
        sinks = nn.Parameter(torch.empty(spec.num_heads), requires_grad=False) if form.sinks else None
        spec = replace(spec, sinks=sinks, **norms)
        inner = size if isinstance(size, int) else size[-1]
        shards = self.context.sharding.attention(self.prefix, spec, inner, form.fused)
        spec = shards.spec
        if isinstance(size, int):
            rows = _halves(spec, parts, shards.qkv) if form.interleaved else None
            qkv_proj = self.linear("qkv_proj", size, outputs, bias=form.qkv_bias, shard=shards.qkv, rows=rows)
        else:
            assert shards.qkv is None, "joined projections are not shared among ranks"
            qkv_proj = self.joined("qkv_proj", size, outputs, bias=form.qkv_bias)
        o_proj = self.linear("o_proj", query_size, inner, bias=form.output_bias, shard=shards.output)
        return self._note(SelfAttention(self.context.backend, spec, qkv_proj, o_proj, q_norm, k_norm, sinks))

    def _note(self, block: SelfAttention) -> SelfAttention:
        spec = block.spec
        self.context.cache_layers.append(LayerCache(spec.num_kv_heads, spec.head_dim, spec.window))
        self.context.attentions.append(block)
        return block

    def _whole_norm_attention(self, size: int, spec: AttentionSpec, form: AttentionForm) -> SelfAttention:
        """The norms need all heads, so each rank attends to all, and has all of what makes keys and values."""
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        gathered, bias = self.context.sharding.gathered, form.qkv_bias
        q_proj = self.linear("q_proj", size, query_size, bias=bias, shard=gathered(query_size))
        kv_proj = self.linear("qkv_proj", size, {"k_proj": kv_size, "v_proj": kv_size}, bias=bias)
        o_proj = self.linear("o_proj", query_size, size, bias=form.output_bias, shard=gathered(size))
        norms = self.rms_norm(query_size, spec.norm_eps), self.rms_norm(kv_size, spec.norm_eps)
        return WholeNormAttention(q_proj, self.context.backend, spec, kv_proj, o_proj, *norms)

    def gated_mlp(
        self, size: int, inner_size: int, *, activation: str, bias: bool = False, fused: bool = False
    ) -> GatedMLP:
        """A gated MLP; this builder's name is the block's.

        Args:
            fused: the checkpoint holds the gate and what it is multiplied with as one matrix.
        """
        parts = {"gate_proj": inner_size, "up_proj": inner_size}
        inner, whole = self.context.sharding.inner(self.prefix, size, inner_size, *parts)
        if fused and inner is not None:
            [gate] = inner.rows["gate_proj"]
            inner = replace(inner, rows={"": (gate, range(gate.start + inner_size, gate.stop + inner_size))})
        gate_up = self.linear("gate_up_proj", size, 2 * inner_size if fused else parts, bias=bias, shard=inner)
        return GatedMLP(gate_up, self.linear("down_proj", inner_size, size, bias=bias, shard=whole), activation)

    def mlp(self, size: int, inner_size: int, *, activation: str, bias: bool = False) -> MLP:
        """A plain MLP; this builder's name is the block's."""
        inner, whole = self.context.sharding.inner(self.prefix, size, inner_size, "")
        fc1 = self.linear("fc1", size, inner_size, bias=bias, shard=inner)
        return MLP(fc1, self.linear("fc2", inner_size, size, bias=bias, shard=whole), activation)

    def experts(
        self,
        size: int,
        inner_size: int,
        routing: Routing,
        *,
        activation: str,
        shared_size: int = 0,
        bias: bool = False,
        choosing_bias: bool = False,
    ) -> MixtureOfExperts:
        """A mixture of gated MLPs, and where `shared_size` is not 0 one more that all tokens share.

        Args:
            bias: of the router, and of the experts' matrices.
            choosing_bias: `routing` is to have a bias, and the shared expert no gate that weighs it.
        """
        if choosing_bias:  # in float32 whatever the model's type, as kernels read it
            routing = replace(routing, bias=nn.Parameter(torch.empty(routing.num_experts), requires_grad=False))
        gate = self.linear("gate", size, routing.num_experts, bias=bias, plain=True)
        owners, experts = self.context.sharding.experts(self.prefix, routing.num_experts), []
        for i in range(routing.num_experts):
            child = self.child(f"experts.{i}")
            if owners is not None:
                child = Builder(replace(self.context, sharding=Sharding()), child.prefix, i in owners.own)
            experts.append(child.gated_mlp(size, inner_size, activation=activation, bias=bias))
        shared: tuple[GatedMLP, Linear | None] | None = None
        if shared_size:
            expert = self.child("shared_expert").gated_mlp(size, shared_size, activation=activation)
            shared = expert, self.linear("shared_expert_gate", size, 1, plain=True) if not choosing_bias else None
        return MixtureOfExperts(routing, gate, experts, shared, owners)

    def _place(self, name: str, *, parts: tuple[str, ...] = (), table: bool = False) -> Place:
        full, context = self.name(name), self.context
        method = context.formats.method_for(full, parts=parts, table=table) if self.here else _Elsewhere()
        return Place(full, method, context.dtype)


def _halves(spec: AttentionSpec, parts: Mapping[str, int], shard: Shard | None) -> dict[str, Sequence[range]]:
    """The rows that are here, where a checkpoint has pairs that rotate: of each head even ones, then odd ones."""
    rows = {part: (range(size),) for part, size in parts.items()} if shard is None else shard.rows
    dim, rotated = spec.head_dim, 0 if spec.rope is None else spec.rope.shape[-1]
    pieces = ((0, rotated, 2), (1, rotated, 2), (rotated, dim, 1))
    found = dict[str, Sequence[range]](rows)
    for part in ("q_proj", "k_proj"):
        heads = (head for own in rows[part] for head in own[::dim])
        found[part] = [range(head + a, head + b, step) for head in heads for a, b, step in pieces if a < b]
    return found
