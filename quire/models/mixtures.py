"""Llama's kin that have a mixture of experts in place of the MLP, in all layers or in some.

Mixtral (arXiv:2401.04088), which is Mistral but for that; Qwen2-MoE (arXiv:2407.10671), with an expert that every token
shares, weighed by a gate of its own, and Qwen3-MoE (arXiv:2505.09388); OLMoE (arXiv:2409.02060), with OLMo 2's norms of
whole queries and keys; GraniteMoE (Granite 3's 1B and 3B of A400M and A800M, and PowerMoE), and Granite 4 where every
layer attends (350M, 1B, Micro), whose plain MLPs are kept as a mixture's shared experts; gpt-oss (arXiv:2508.10925),
with biases, attention sinks and windows, whose router weighs those chosen by their scores alone; and with a bias by
which experts are chosen, and a shared one without a gate, ERNIE 4.5's (21B-A3B) and GLM-4.5 to 4.7
(arXiv:2508.06471). Checkpoints hold experts one by one, or a layer's as one tensor (`quire.models.stacked`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.layers.moe import Routing
from quire.models.llama import FeedForward, LlamaShape, biases, ernie_shape, gated_mlp, granite_shape
from quire.models.settings import count, indices, number
from quire.models.stacked import cut_experts
from quire.models.weights import CheckpointFormat, Cut, TensorSpec
from quire.ops.activation import OAI_LIMIT, OAI_SLOPE

_BLOCK = ".block_sparse_moe."
_GRANITE_NAMES = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.weight": "router.layer.weight",
}


def _cut_granite(spec: TensorSpec, hidden_size: int) -> Iterator[Cut]:
    layer, block, name = spec.name.partition(_BLOCK)
    return cut_experts(replace(spec, name=layer + block + _GRANITE_NAMES.get(name, name)), hidden_size)


def _cut_ernie(spec: TensorSpec, hidden_size: int) -> Iterator[Cut]:
    if spec.name.endswith("e_score_correction_bias"):  # [1, experts]
        yield replace(spec, shape=spec.shape[-1:]), Tensor.flatten
    else:
        yield from cut_experts(spec, hidden_size)


FORMAT = CheckpointFormat(cut=cut_experts)
_SHARED = (".shared_expert.", ".shared_experts.")
_GLM = replace(FORMAT, names=(_SHARED, (".mlp.e_score_", ".mlp.gate.e_score_")))
_ERNIE = CheckpointFormat(
    names=(_SHARED, (".mlp.e_score_", ".mlp.moe_statics.e_score_")), left_out=("mtp_",), cut=_cut_ernie
)
_GPT_OSS = CheckpointFormat(names=((".mlp.gate.", ".mlp.router."),), cut=partial(cut_experts, by_turns=True))
_MIXTRAL = CheckpointFormat(
    names=((".mlp.", _BLOCK), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))
)
_HYBRID = CheckpointFormat(
    names=((".mlp.gate_up_proj.", ".shared_mlp.input_linear."), (".mlp.down_proj.", ".shared_mlp.output_linear."))
)
_GRANITE = CheckpointFormat(names=((".mlp.", _BLOCK), (".gate.", ".router.layer.")), cut=_cut_granite)


def mixture(
    config: ModelConfig,
    routing: Routing | bool = True,
    inner_size: int = 0,
    is_plain: Callable[[int], bool] = lambda index: False,
    **others: Any,
) -> FeedForward:
    """A mixture of experts in each layer, which are as wide as a plain MLP where there is no `inner_size`.

    Args:
        routing: or whether the usual one, by softmax, divides weights by their sum.
        is_plain: whether a layer has a plain MLP instead.
        others: what `Builder.experts` takes besides, of which the activation is config.json's where it is not there.
    """
    if isinstance(routing, bool):
        num_experts = count(config, "num_local_experts", count(config, "num_experts", 8))
        routing = Routing(num_experts, count(config, "num_experts_per_tok", 2, most=num_experts), routing)
    others.setdefault("activation", str(config.hf_config.get("hidden_act") or "silu"))
    sizes, plain = (config.hidden_size, inner_size or config.intermediate_size), gated_mlp(config)
    return lambda index, builder: (
        plain(index, builder) if is_plain(index) else builder.experts(*sizes, routing, **others)
    )


def mixtral_shape(config: ModelConfig) -> LlamaShape:
    """MixtralForCausalLM."""
    return LlamaShape(feed_forward=mixture(config), form=_MIXTRAL)


def gpt_oss_shape(config: ModelConfig) -> LlamaShape:
    """GptOssForCausalLM."""
    for key, wanted in (("swiglu_limit", OAI_LIMIT), ("swiglu_alpha", OAI_SLOPE)):
        if (found := number(config, key, wanted)) != wanted:
            said = f"config.json of model {config.model!r} has {key} = {found}"
            raise ModelLoadError(f"{said}; only {wanted} is supported.")
    experts = mixture(config, bias=True, activation="swiglu_oai")
    return replace(biases(config, default=True), sinks=True, feed_forward=experts, form=_GPT_OSS)


def granite_hybrid_shape(config: ModelConfig) -> LlamaShape:
    """GraniteMoeHybridForCausalLM without state spaces (arXiv:2405.21060) and experts.

    Where "rope" is not its `position_embedding_type`, nothing rotates.
    """
    if config.hf_config.get("layer_types") is None or count(config, "num_local_experts", 8, least=0):
        raise ModelLoadError(
            f"model {config.model!r} has layers of state spaces, or experts (layer_types, num_local_experts): of this "
            "architecture only models of attention and plain MLPs are supported."
        )
    inner = replace(config, intermediate_size=count(config, "shared_intermediate_size", 1024))
    rotated = (config.hf_config.get("position_embedding_type") == "rope",) * config.num_layers
    return replace(granite_shape(config), feed_forward=gated_mlp(inner, fused=True), rotated=rotated, form=_HYBRID)


def granite_moe_shape(config: ModelConfig) -> LlamaShape:
    """GraniteMoeForCausalLM."""
    return replace(granite_shape(config), feed_forward=mixture(config), form=_GRANITE)


def olmoe_shape(config: ModelConfig) -> LlamaShape:
    """OlmoeForCausalLM."""
    if config.hf_config.get("clip_qkv") is not None:
        raise ModelLoadError(f"model {config.model!r} clips queries, keys and values (clip_qkv): not supported yet.")
    experts = mixture(config, bool(config.hf_config.get("norm_topk_prob", False)))
    return replace(biases(config), whole_norms=True, feed_forward=experts, form=FORMAT)


def qwen2_shape(config: ModelConfig) -> LlamaShape:
    """Qwen2MoeForCausalLM."""
    shared_size = count(config, "shared_expert_intermediate_size", 5632, least=0)
    bias = bool(config.hf_config.get("qkv_bias", True))
    return LlamaShape(bias, feed_forward=_of_qwen(config, shared_size=shared_size), form=FORMAT)


def qwen3_shape(config: ModelConfig, renormalize: bool | None = None) -> LlamaShape:
    """Qwen3MoeForCausalLM. `renormalize`: whether the experts' weights are; None: as config.json says."""
    return replace(biases(config), head_norms=True, feed_forward=_of_qwen(config, renormalize), form=FORMAT)


def qwen3_vl_shape(config: ModelConfig) -> LlamaShape:
    """The language model of Qwen3VLMoeForConditionalGeneration."""
    return qwen3_shape(config, renormalize=True)


def _of_qwen(config: ModelConfig, renormalize: bool | None = None, shared_size: int = 0) -> FeedForward:
    """What follows attention in each layer: experts in every so manieth one, a plain MLP in those that are named."""
    dense = indices(config, "mlp_only_layers")
    if not count(config, "num_local_experts", count(config, "num_experts", 128, least=0), least=0):
        return gated_mlp(config)
    if renormalize is None:
        renormalize = bool(config.hf_config.get("norm_topk_prob", False))
    inner_size, every = count(config, "moe_intermediate_size", 768), count(config, "decoder_sparse_step", 1)

    def is_plain(index: int) -> bool:
        return index in dense or (index + 1) % every != 0

    return mixture(config, renormalize, inner_size, is_plain, shared_size=shared_size)


def glm_shape(config: ModelConfig) -> LlamaShape:
    """Glm4MoeForCausalLM."""
    if count(config, "n_group", 1) != 1:
        raise ModelLoadError(f"model {config.model!r} chooses groups of experts first (n_group): not supported yet.")
    num_experts = count(config, "n_routed_experts", 128)
    top_k = count(config, "num_experts_per_tok", 8, most=num_experts)
    renormalize = bool(config.hf_config.get("norm_topk_prob", True))
    routing = Routing(num_experts, top_k, renormalize, True, number(config, "routed_scaling_factor", 1.0))
    inner_size, num_plain = count(config, "moe_intermediate_size", 1408), count(config, "first_k_dense_replace", 1, 0)
    shared_size = inner_size * count(config, "n_shared_experts", 1)
    experts = mixture(config, routing, inner_size, lambda i: i < num_plain, choosing_bias=True, shared_size=shared_size)
    form = replace(_GLM, left_out=(f"layers.{config.num_layers}.",))  # which drafts
    bias, norms = bool(config.hf_config.get("attention_bias", False)), bool(config.hf_config.get("use_qk_norm", False))
    return LlamaShape(bias, head_norms=norms, feed_forward=experts, form=form)


def ernie_moe_shape(config: ModelConfig) -> LlamaShape:
    """Ernie4_5_MoeForCausalLM."""
    num_experts = count(config, "moe_num_experts", 64)
    routing = Routing(num_experts, count(config, "moe_k", 6, most=num_experts), renormalize=True)
    inner_size, every = count(config, "moe_intermediate_size", 1536), count(config, "moe_layer_interval", 1)
    first = count(config, "moe_layer_start_index", 1, least=0)
    last = count(config, "moe_layer_end_index", -1, least=-1) % config.num_layers

    def is_plain(index: int) -> bool:
        return not first <= index <= last or (index + 1) % every != 0

    shared_size = inner_size * count(config, "moe_num_shared_experts", 2, least=0)
    experts = mixture(config, routing, inner_size, is_plain, choosing_bias=True, shared_size=shared_size)
    return replace(ernie_shape(config), feed_forward=experts, form=_ERNIE)
