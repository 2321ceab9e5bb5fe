"""Command R and Aya (Cohere), and Command R7B and A (Cohere2): Llama, with attention and MLP beside each other.

Norms are LayerNorms without a bias, and neighbouring features rotate together: in Cohere2 only in layers with a window.
"""

from dataclasses import replace
from functools import partial

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.builder import Builder
from quire.models.llama import LlamaShape, biases
from quire.models.settings import number


def cohere_shape(config: ModelConfig) -> LlamaShape:
    """CohereForCausalLM."""
    if config.hf_config.get("use_qk_norm"):
        raise ModelLoadError(f"model {config.model!r} has norms of queries and keys (use_qk_norm): not supported yet.")
    return _shape(config)


def cohere2_shape(config: ModelConfig) -> LlamaShape:
    """Cohere2ForCausalLM."""
    rotated = tuple(window is not None for window in config.layer_windows)
    return replace(_shape(config), rotated=rotated)


def _shape(config: ModelConfig) -> LlamaShape:
    eps = number(config, "layer_norm_eps", number(config, "layer_norm_epsilon", 1e-5))  # the latter a GGUF file's
    norm = partial(Builder.layer_norm, size=config.hidden_size, eps=eps, bias=False)
    scale = number(config, "logit_scale", 0.0625)
    return replace(biases(config), interleaved=True, norm=norm, norms="beside", logit_scale=scale)
