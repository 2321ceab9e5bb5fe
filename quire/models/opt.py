"""OPT (arXiv:2205.01068): learned positions, LayerNorm, ReLU.

The 350M model differs: it normalizes after each block instead of before, has no final norm, and its embeddings are
narrower than its layers.
"""

from functools import partial

from torch import Tensor, nn

from quire.attention.base import AttentionSpec
from quire.attention.step import Step
from quire.config.model import ModelConfig
from quire.models.builder import AttentionForm, Builder
from quire.models.causal_lm import CausalLM
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.settings import count
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(
    names=(
        ("model.norm.", "model.final_layer_norm."),
        (".input_layernorm.", ".self_attn_layer_norm."),
        (".post_attention_layernorm.", ".final_layer_norm."),
        (".self_attn.o_proj.", ".self_attn.out_proj."),
        (".mlp.", "."),
        ("model.", "model.decoder."),
    ),
    ignored=("decoder.version",),
)
POSITION_OFFSET = 2  # rows of the position table before that of position 0


class PostNormLayer(DecoderLayer):
    """``x = norm(x + attention(x)); x = norm(x + mlp(x))``: there is no residual stream beside x."""

    def forward(self, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, None]:
        """x [T, H] -> [T, H]; takes and returns no residual."""
        x, _ = self.input_layernorm.add(self.self_attn(x, step), x)
        x, _ = self.post_attention_layernorm.add(self.mlp(x, step), x)
        return x, None


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """OPTForCausalLM."""
    hf, size = config.hf_config, config.hidden_size
    bias = bool(hf.get("enable_bias", True))
    pre_norm = bool(hf.get("do_layer_norm_before", True))
    activation = str(hf.get("activation_function", "relu"))
    spec = AttentionSpec(config.num_heads, config.num_heads, config.head_dim, config.head_dim**-0.5)
    norm = partial(builder.layer_norm, size, 1e-5, affine=bool(hf.get("layer_norm_elementwise_affine", True)))

    def layer(index: int, builder: Builder) -> nn.Module:
        attention = builder.child("self_attn").attention(size, spec, AttentionForm(bias, bias))
        mlp = builder.child("mlp").mlp(size, config.intermediate_size, activation=activation, bias=bias)
        return (DecoderLayer if pre_norm else PostNormLayer)(norm(), attention, norm(), mlp)

    body = builder.child("model")
    narrow = count(config, "word_embed_proj_dim", size)
    projections = None
    if narrow != size:
        projections = body.first.linear("project_in", narrow, size), body.last.linear("project_out", size, narrow)
    embedding = body.embedding("embed_tokens", config.vocab_size, narrow)
    positions = body.first.positions("embed_positions", config.derived_max_model_len, size, POSITION_OFFSET)
    final_norm = norm() if pre_norm and not hf.get("_remove_final_layer_norm", False) else None
    layers = body.layers(config.num_layers, layer)
    decoder = Decoder(embedding, layers, final_norm, positions, projections=projections)
    return CausalLM(config, builder, decoder, embedding, FORMAT)
