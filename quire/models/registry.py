"""Which architectures there are, and how to build one. The worker calls `build_model` at start-up."""

from collections.abc import Callable
from typing import Any

import torch

from quire.attention.base import AttentionBackend
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models import gpt2, llama, mistral, opt, qwen2, qwen3
from quire.models.causal_lm import BuildContext, CausalLM
from quire.quantization.base import QuantizationMethod
from quire.quantization.unquantized import Unquantized

__all__ = ["SUPPORTED_ARCHITECTURES", "CausalLM", "build_model"]

_BUILDERS: dict[str, Callable[[ModelConfig, BuildContext], CausalLM]] = {
    "GPT2LMHeadModel": gpt2.build,
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "OPTForCausalLM": opt.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}
SUPPORTED_ARCHITECTURES = tuple(_BUILDERS)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def check_architecture(config: ModelConfig) -> None:
    """Refuse an architecture that has no implementation (ModelLoadError), before anything is loaded."""
    if config.architecture not in _BUILDERS:
        raise ModelLoadError(
            f"architecture {config.architecture!r} of model {config.model!r} is not supported; supported are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}."
        )


def build_model(
    config: ModelConfig,
    attention_backend: AttentionBackend[Any],
    method: QuantizationMethod | None = None,
    table_method: QuantizationMethod | None = None,
) -> CausalLM:
    """Build the model that `config` describes; its parameters are allocated and not yet filled.

    Args:
        method: the weight format of the linear layers; None keeps the checkpoint's, multiplied by torch.
        table_method: that of embeddings and the output head; None means `method`.

    Raises:
        ModelLoadError: an architecture, activation or rope type that is not supported.
    """
    check_architecture(config)
    method = method or Unquantized()
    context = BuildContext(attention_backend, method, table_method or method, DTYPES[config.dtype])
    return _BUILDERS[config.architecture](config, context).eval()
