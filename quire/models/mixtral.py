"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in place of each MLP."""

from torch import nn

from quire.config.model import ModelConfig
from quire.layers.moe import Routing
from quire.models.builder import Builder
from quire.models.causal_lm import CausalLM
from quire.models.llama import LlamaShape, build_llama
from quire.models.settings import count
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(
    names=((".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")),
)


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """MixtralForCausalLM."""
    num_experts, top_k = count(config, "num_local_experts", 8), count(config, "num_experts_per_tok", 2)
    routing = Routing(num_experts, top_k, renormalize=True)
    activation = str(config.hf_config.get("hidden_act", "silu"))

    def experts(index: int, builder: Builder) -> nn.Module:
        return builder.experts(config.hidden_size, config.intermediate_size, routing, activation=activation)

    return build_llama(config, builder, LlamaShape(feed_forward=experts, form=FORMAT))
