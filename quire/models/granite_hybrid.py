"""Granite 4 where every layer attends (350M, 1B, Micro): Granite, whose MLPs are kept as mixtures' shared experts.

The hybrids' layers of state spaces (arXiv:2405.21060), and experts beside a shared one, are not built here.
"""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.llama import LlamaShape, gated_mlp, granite_shape
from quire.models.settings import count
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(
    names=((".mlp.gate_up_proj.", ".shared_mlp.input_linear."), (".mlp.down_proj.", ".shared_mlp.output_linear.")),
)


def shape(config: ModelConfig) -> LlamaShape:
    """GraniteMoeHybridForCausalLM; without "rope" as its `position_embedding_type`, nothing rotates."""
    if config.hf_config.get("layer_types") is None or count(config, "num_local_experts", 8, least=0):
        raise ModelLoadError(
            f"model {config.model!r} has layers of state spaces, or experts (layer_types, num_local_experts): of this "
            "architecture only models of attention and plain MLPs are supported."
        )
    inner = replace(config, intermediate_size=count(config, "shared_intermediate_size", 1024))
    rotated = (config.hf_config.get("position_embedding_type") == "rope",) * config.num_layers
    return replace(granite_shape(config), feed_forward=gated_mlp(inner, fused=True), rotated=rotated, form=FORMAT)
