"""Llama's kin with a plain MLP: StarCoder2 (arXiv:2402.19173), which has LayerNorms and biases, and some a window, and
Arcee's AFM, whose activation is the square of ReLU (arXiv:2109.08668)."""

from dataclasses import replace
from functools import partial

from quire.config.model import ModelConfig
from quire.models.builder import Builder
from quire.models.llama import LlamaShape, biases, plain_mlp
from quire.models.settings import number
from quire.models.weights import CheckpointFormat

_ARCEE = CheckpointFormat(names=((".mlp.fc1.", ".mlp.up_proj."), (".mlp.fc2.", ".mlp.down_proj.")))
_STARCODER = CheckpointFormat(names=((".mlp.fc1.", ".mlp.c_fc."), (".mlp.fc2.", ".mlp.c_proj.")))


def arcee_shape(config: ModelConfig) -> LlamaShape:
    """ArceeForCausalLM."""
    mlp = plain_mlp(config, "relu2", bool(config.hf_config.get("mlp_bias", False)))
    return replace(biases(config), feed_forward=mlp, form=_ARCEE)


def starcoder2_shape(config: ModelConfig) -> LlamaShape:
    """Starcoder2ForCausalLM."""
    bias = bool(config.hf_config.get("use_bias", True))
    eps = number(config, "norm_epsilon", number(config, "layer_norm_epsilon", 1e-5))  # the latter a GGUF file's
    norm = partial(Builder.layer_norm, size=config.hidden_size, eps=eps)
    mlp = plain_mlp(config, "gelu_pytorch_tanh", bias)
    return LlamaShape(bias, bias, norm=norm, feed_forward=mlp, form=_STARCODER)
