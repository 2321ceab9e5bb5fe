"""Arcee's AFM: Llama with a plain MLP, whose activation is the square of ReLU (arXiv:2109.08668)."""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.models.llama import LlamaShape, biases, plain_mlp
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(names=((".mlp.fc1.", ".mlp.up_proj."), (".mlp.fc2.", ".mlp.down_proj.")))


def shape(config: ModelConfig) -> LlamaShape:
    """ArceeForCausalLM."""
    mlp = plain_mlp(config, "relu2", bool(config.hf_config.get("mlp_bias", False)))
    return replace(biases(config), feed_forward=mlp, form=FORMAT)
