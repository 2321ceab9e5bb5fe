"""Gemma 1, 2 and 3 (arXiv:2403.08295, 2408.00118, 2503.19786), text only.

Norms multiply by 1 + weight, embeddings are scaled by the root of their size, the MLP's gate is a GELU. Gemma 2 adds
norms after each block, caps on scores and logits, and windows in every other layer; Gemma 3 has norms of queries and
keys in place of the caps, and rotates layers with a window by frequencies of their own.
"""

from dataclasses import replace
from functools import partial

import torch

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.builder import Builder
from quire.models.llama import LlamaShape, biases, gated_mlp
from quire.models.settings import number

TANH_GELU = "gelu_pytorch_tanh"


def gemma_shape(config: ModelConfig) -> LlamaShape:
    """GemmaForCausalLM."""
    activation = config.hf_config.get("hidden_activation") or config.hf_config.get("hidden_act") or TANH_GELU
    # The first checkpoints say "gelu" and mean its tanh form.
    return _shape(config, TANH_GELU if activation == "gelu" else str(activation))


def gemma2_shape(config: ModelConfig) -> LlamaShape:
    """Gemma2ForCausalLM."""
    score_cap, logit_cap = _cap(config, "attn_logit_softcapping", 50.0), _cap(config, "final_logit_softcapping", 30.0)
    return replace(_later(config), score_cap=score_cap, logit_cap=logit_cap)


def gemma3_shape(config: ModelConfig) -> LlamaShape:
    """Gemma3ForCausalLM."""
    return replace(_later(config), head_norms=True)


def _later(config: ModelConfig) -> LlamaShape:
    """What the second and the third have of their own: norms after each block, too, and a scale of the scores."""
    shape = _shape(config, str(config.hf_config.get("hidden_activation", TANH_GELU)))
    return replace(shape, norms="around", score_scale=number(config, "query_pre_attn_scalar", 256.0) ** -0.5)


def _shape(config: ModelConfig, activation: str) -> LlamaShape:
    hf, size = config.hf_config, config.hidden_size
    if hf.get("use_bidirectional_attention"):
        raise ModelLoadError("use_bidirectional_attention is not supported: such a model generates no text.")
    return replace(
        biases(config),
        feed_forward=gated_mlp(config, activation=activation),
        norm=partial(Builder.rms_norm, size=size, eps=number(config, "rms_norm_eps", 1e-6), plus_one=True),
        norm_plus_one=True,
        # Rounded, as models were trained with.
        embed_scale=torch.tensor(size**0.5, device="cpu").to(getattr(torch, config.dtype)).item(),
        logit_cap=_cap(config, "final_logit_softcapping", None),
    )


def _cap(config: ModelConfig, key: str, default: float | None) -> float | None:
    """A cap of config.json; an absent key means the default, null means none."""
    hf = config.hf_config
    return None if hf.get(key, default) is None else number(config, key, default or 0.0)
