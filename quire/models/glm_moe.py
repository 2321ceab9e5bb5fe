"""GLM-4.5 to 4.7 (arXiv:2508.06471) and dots.llm1 (arXiv:2506.05767): Llama with experts from some layer on.

Experts are chosen by the sigmoids of their scores, with a bias; one that all tokens share has no gate.
"""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.layers.moe import Routing
from quire.models.llama import LlamaShape, biases, mixture
from quire.models.settings import count, number
from quire.models.stacked import cut_experts
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(
    names=((".shared_expert.", ".shared_experts."), (".mlp.e_score_", ".mlp.gate.e_score_")), cut=cut_experts
)


def glm_shape(config: ModelConfig) -> LlamaShape:
    """Glm4MoeForCausalLM."""
    head_norms = bool(config.hf_config.get("use_qk_norm", False))
    return replace(dots_shape(config, renormalize=True), head_norms=head_norms, output_bias=False)


def dots_shape(config: ModelConfig, renormalize: bool = False) -> LlamaShape:
    """Dots1ForCausalLM. `renormalize`: of the experts' weights, where config.json does not say whether."""
    if count(config, "n_group", 1) != 1:
        raise ModelLoadError(f"model {config.model!r} chooses groups of experts first (n_group): not supported yet.")
    num_experts, top_k = count(config, "n_routed_experts", 128), count(config, "num_experts_per_tok", 8)
    renormalize = bool(config.hf_config.get("norm_topk_prob", renormalize))
    routing = Routing(num_experts, top_k, renormalize, True, number(config, "routed_scaling_factor", 1.0))
    inner_size, num_plain = count(config, "moe_intermediate_size", 1408), count(config, "first_k_dense_replace", 0, 0)
    shared_size = inner_size * count(config, "n_shared_experts", 0, least=0)
    others = {"choosing_bias": True, "shared_size": shared_size, "shared_gate": False}
    experts = mixture(config, routing, inner_size, lambda index: index < num_plain, **others)
    form = replace(FORMAT, left_out=(f"layers.{config.num_layers}.",))  # which drafts
    return replace(biases(config), head_norms=True, feed_forward=experts, form=form)
