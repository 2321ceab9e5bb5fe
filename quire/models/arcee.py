"""Arcee's AFM: Llama with a plain MLP, whose activation is the square of ReLU (arXiv:2109.08668)."""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.models.builder import Builder
from quire.models.causal_lm import CausalLM
from quire.models.llama import biases, build_llama, plain_mlp
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(names=((".mlp.fc1.", ".mlp.up_proj."), (".mlp.fc2.", ".mlp.down_proj.")))


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """ArceeForCausalLM."""
    mlp = plain_mlp(config, "relu2", bool(config.hf_config.get("mlp_bias", False)))
    return build_llama(config, builder, replace(biases(config), feed_forward=mlp, form=FORMAT))
