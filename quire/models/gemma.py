"""Gemma 1, 2 and 3 (arXiv:2403.08295, 2408.00118, 2503.19786), text only.

Norms multiply by 1 + weight, embeddings are scaled by the root of their size, the MLP's gate is a GELU. Gemma 2 adds
norms after each block, caps on scores and logits, and windows in every other layer; Gemma 3 has norms of queries and
keys in place of the caps, and rotates layers with a window by frequencies of their own.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from quire.attention.base import AttentionSpec
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.builder import AttentionForm, Builder
from quire.models.causal_lm import CausalLM
from quire.models.decoder import Decoder, decoder_layer
from quire.models.llama import FORMAT, build_rope, llama_attention
from quire.models.settings import number

TANH_GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class GemmaShape:
    """What the generations differ in.

    Attributes:
        sandwich: norms after each block as well, and a scale of the scores by `query_pre_attn_scalar`.
        head_norms: norms over each head of queries and keys.
        score_cap: default of `attn_logit_softcapping`, which is not looked at where this is None.
        logit_cap: default of `final_logit_softcapping`.
    """

    activation: str
    sandwich: bool = False
    head_norms: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None


def build_gemma(config: ModelConfig, builder: Builder) -> CausalLM:
    """GemmaForCausalLM."""
    activation = config.hf_config.get("hidden_activation") or config.hf_config.get("hidden_act") or TANH_GELU
    # The first checkpoints say "gelu" and mean its tanh form.
    return _build(config, builder, GemmaShape(TANH_GELU if activation == "gelu" else str(activation)))


def build_gemma2(config: ModelConfig, builder: Builder) -> CausalLM:
    """Gemma2ForCausalLM."""
    activation = str(config.hf_config.get("hidden_activation", TANH_GELU))
    return _build(config, builder, GemmaShape(activation, sandwich=True, score_cap=50.0, logit_cap=30.0))


def build_gemma3(config: ModelConfig, builder: Builder) -> CausalLM:
    """Gemma3ForCausalLM."""
    activation = str(config.hf_config.get("hidden_activation", TANH_GELU))
    return _build(config, builder, GemmaShape(activation, sandwich=True, head_norms=True))


def _build(config: ModelConfig, builder: Builder, shape: GemmaShape) -> CausalLM:
    hf, size = config.hf_config, config.hidden_size
    if hf.get("use_bidirectional_attention"):
        raise ModelLoadError("use_bidirectional_attention is not supported: such a model generates no text.")
    eps, bias = number(config, "rms_norm_eps", 1e-6), bool(hf.get("attention_bias", False))
    spec, window_rope = _attention(config, shape), build_rope(config, config.window_rope_parameters)

    def layer(index: int, builder: Builder) -> nn.Module:
        window = config.layer_windows[index]
        own = replace(spec, window=window, rope=spec.rope if window is None else window_rope)
        attention = builder.child("self_attn").attention(size, own, AttentionForm(bias, bias, shape.head_norms))
        mlp = builder.child("mlp").gated_mlp(size, config.intermediate_size, activation=shape.activation)
        norm = partial(builder.rms_norm, size, eps, plus_one=True)
        return decoder_layer("around" if shape.sandwich else "before", norm, attention, mlp)

    body = builder.child("model")
    embedding = body.embedding("embed_tokens", config.vocab_size, size)
    layers = body.layers(config.num_layers, layer)
    # Rounded, as models were trained with.
    scale = torch.tensor(size**0.5, device="cpu").to(builder.context.dtype).item()
    decoder = Decoder(embedding, layers, body.rms_norm(size, eps, plus_one=True), embed_scale=scale)
    cap = _cap(config, "final_logit_softcapping", shape.logit_cap)
    return CausalLM(config, builder, decoder, embedding, FORMAT, logit_softcap=cap)


def _attention(config: ModelConfig, shape: GemmaShape) -> AttentionSpec:
    """The attention of all layers, windows and their rotation aside."""
    spec = replace(llama_attention(config, build_rope(config)), norm_plus_one=True)
    if not shape.sandwich:
        return spec
    scalar = number(config, "query_pre_attn_scalar", 256.0)
    cap = shape.score_cap and _cap(config, "attn_logit_softcapping", shape.score_cap)
    return replace(spec, scale=scalar**-0.5, softcap=cap)


def _cap(config: ModelConfig, key: str, default: float | None) -> float | None:
    """A cap of config.json; an absent key means the default, null means none."""
    hf = config.hf_config
    return None if hf.get(key, default) is None else number(config, key, default or 0.0)
