"""StarCoder2 (arXiv:2402.19173): Llama with LayerNorms, biases, and a plain MLP; some have a window."""

from functools import partial

from quire.config.model import ModelConfig
from quire.models.builder import Builder
from quire.models.llama import LlamaShape, plain_mlp
from quire.models.settings import number
from quire.models.weights import CheckpointFormat

FORMAT = CheckpointFormat(names=((".mlp.fc1.", ".mlp.c_fc."), (".mlp.fc2.", ".mlp.c_proj.")))


def shape(config: ModelConfig) -> LlamaShape:
    """Starcoder2ForCausalLM."""
    bias = bool(config.hf_config.get("use_bias", True))
    eps = number(config, "norm_epsilon", number(config, "layer_norm_epsilon", 1e-5))  # the latter a GGUF file's
    norm = partial(Builder.layer_norm, size=config.hidden_size, eps=eps)
    mlp = plain_mlp(config, "gelu_pytorch_tanh", bias)
    return LlamaShape(bias, bias, norm=norm, feed_forward=mlp, form=FORMAT)
