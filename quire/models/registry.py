"""Builds the model of an architecture. The worker calls `build_model` at start-up; the table is `config.families`."""

import importlib
from dataclasses import replace
from types import ModuleType

import torch

from quire.attention.base import AttentionBackend
from quire.config.families import built_family
from quire.config.model import ModelConfig
from quire.config.worker import Stage
from quire.errors import ModelLoadError
from quire.layers.moe import MixtureOfExperts
from quire.models.builder import BuildContext, Builder
from quire.models.causal_lm import CausalLM
from quire.models.llama import build_llama
from quire.models.sharding import Sharding
from quire.models.weights import CheckpointFormat
from quire.quantization.base import Unquantized
from quire.quantization.registry import WeightFormats, uniform

__all__ = ["CausalLM", "build_model"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def checkpoint_format(config: ModelConfig) -> CheckpointFormat:
    """How checkpoints of the model's family name things (ModelLoadError: an architecture that is not supported)."""
    return getattr(_place(config)[0], "FORMAT", CheckpointFormat())


def _place(config: ModelConfig) -> tuple[ModuleType, str]:
    """The module of the family that the model is of, and the name there of what says its shape."""
    module, _, function = built_family(config.architecture, config.model).shape.partition(":")
    return importlib.import_module(f"quire.models.{module}"), function


def build_model(
    config: ModelConfig,
    attention_backend: AttentionBackend,
    formats: WeightFormats | None = None,
    sharding: Sharding | None = None,
    stage: Stage | None = None,
) -> CausalLM:
    """Build the model that `config` describes; its parameters are allocated and not yet filled.

    Args:
        formats: the weight formats; None keeps the checkpoint's weights, multiplied by torch.
        sharding: what of each layer is built; None for all.
        stage: the layers that are built; None for all.

    Raises:
        ModelLoadError: an architecture, activation or rope type that is not supported, or sizes that ranks can't share.
    """
    shape = getattr(*_place(config))(config)
    plain, dtype = uniform(Unquantized()), DTYPES[config.dtype]
    sharding = sharding or Sharding()
    context = BuildContext(attention_backend, formats or plain, dtype, sharding)
    is_whole = stage is None or (stage.is_first and stage.is_last)
    if stage is not None and not is_whole:
        has_table = stage.is_first or (stage.is_last and config.tie_word_embeddings)
        context = replace(context, stage=stage, has_table=has_table)
    model = build_llama(config, Builder(context), shape).eval()
    if sharding.asks_experts and not any(isinstance(module, MixtureOfExperts) for module in model.modules()):
        raise ModelLoadError(f"model {config.model!r} has no experts to share: leave out enable_expert_parallel.")
    if is_whole and not sharding.whole_experts:
        return model
    whole = BuildContext(attention_backend, plain, dtype)
    model.leave(build_llama(config, Builder(whole), shape))  # whose pages nobody touches
    return model
