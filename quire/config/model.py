"""What the engine knows about a model before it loads a weight: shapes, dtype, context length, end-of-sequence ids.

`quire.config.config_json` reads what its files say; here that is joined with what the options ask for. Called as
options are resolved; models and the runner only read it. Must not know torch, nor which architectures have an
implementation (that is `quire.models.registry`).
"""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.config.config_json import ConfigReader, eos_token_ids, generation_defaults, read_config, read_generation
from quire.errors import ConfigError
from quire.utils.hub import CONFIG_PATTERNS, WEIGHT_PATTERNS, resolve_model_path

logger = logging.getLogger(__name__)

_DTYPES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class ModelConfig:
    """A model's facts, resolved and checked; make one with `from_pretrained`."""

    model: str  # as the user gave it: a path, a hub id, "demo"
    path: Path  # the resolved local directory, or .gguf file
    architecture: str  # e.g. "LlamaForCausalLM"
    model_type: str  # e.g. "llama"; "" where config.json names none
    hf_config: dict[str, Any]  # parsed config.json with overrides (text part of a multi-modal one); never changed
    dtype: str  # "float32", "float16" or "bfloat16"
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_parameters: dict[str, Any]  # always has "rope_type" and "rope_theta"; unused by learned positions
    window_rope_parameters: dict[str, Any] | None  # of the layers that have a window, where they rotate otherwise
    layer_windows: tuple[int | None, ...]  # per layer: tokens a query sees, itself included; None = all before it
    derived_max_model_len: int  # tokens that the model's position encoding supports
    max_model_len: int  # tokens of prompt + output that the engine allows
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]  # config.json's first, then those of generation_config.json, or of several
    generation_defaults: dict[str, Any]  # sampling values of generation_config.json, under its names
    num_labels: int = 0  # classes that its head tells apart; 0: its head is for tokens
    seed: int = 0

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        revision: str | None = None,
        seed: int = 0,
        hf_overrides: dict[str, Any] | None = None,
        load_format: str = "auto",
        download_dir: str | Path | None = None,
        generation_config: str = "auto",
    ) -> "ModelConfig":
        """Resolve `model` to a directory (downloading a hub id if need be) and read its configuration.

        Args:
            model: a local directory or .gguf file, a hub id, a hub id:file.gguf, "demo" or "demo-draft".
            dtype: "auto" takes the checkpoint's own dtype (float32 where it names none); but bfloat16 for float16 where
                that has no kernels: on a CPU, and for quantized weights. A float32 checkpoint runs in half the memory
                with "bfloat16".
            device: as `EngineArgs.device`.
            max_model_len: tokens of prompt + output; at most, and by default, what the position encoding supports.
            hf_overrides: keys of config.json to replace before it is read.
            generation_config: as `EngineArgs.generation_config`; what ends a text there does so besides the model's.
            load_format: as `EngineArgs.load_format`; "dummy" needs (and downloads) no weights.

        Types and ranges of all these are checked already, where `EngineArgs` is made.

        Raises:
            ConfigError: an argument is wrong. ModelLoadError: a file is missing, broken or contradictory.
            NotYetSupportedError: the checkpoint is quantized in a way that is not read.
        """
        _check_overrides(hf_overrides)
        name = os.fspath(model)
        patterns = CONFIG_PATTERNS if load_format == "dummy" else CONFIG_PATTERNS + WEIGHT_PATTERNS
        path = resolve_model_path(name, revision, cache_dir=download_dir, allow_patterns=patterns)
        config, generation = read_config(path, name, hf_overrides or {})
        defaults = generation if generation_config == "auto" else read_generation(generation_config)
        reader = ConfigReader(config, name)
        shapes = reader.shapes()
        rope, window_rope = reader.rope_parameters()
        derived = reader.derived_max_model_len(rope, max_model_len)
        return cls(
            model=name,
            path=path,
            architecture=reader.architecture,
            model_type=reader.model_type,
            hf_config=config,
            dtype=_resolve_dtype(dtype, device, reader),
            **shapes,
            rope_parameters=rope,
            window_rope_parameters=window_rope,
            layer_windows=reader.layer_windows(shapes["num_layers"]),
            derived_max_model_len=derived,
            max_model_len=_resolve_max_model_len(max_model_len, derived, reader.family.learned_positions),
            tie_word_embeddings=bool(reader.get("tie_word_embeddings", default=False)),
            eos_token_ids=eos_token_ids(config, generation, defaults),
            generation_defaults=generation_defaults(defaults, name),
            num_labels=reader.num_labels(),
            seed=seed,
        )


def _check_overrides(hf_overrides: dict[str, Any] | None) -> None:
    try:
        json.dumps(hf_overrides, allow_nan=False)
        msgspec.json.encode(hf_overrides)  # as they go to the engine's process: no lone surrogates
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"hf_overrides must hold what JSON can: texts, numbers, booleans, null, lists and objects ({error})."
        ) from error


def _resolve_dtype(requested: str, device: str, reader: ConfigReader) -> str:
    """The dtype to run in: the user's, or for "auto" the checkpoint's, if there are kernels for that."""
    if requested not in ("auto", *_DTYPES):
        raise ConfigError(f"dtype must be one of auto, {', '.join(_DTYPES)}; got {requested!r}.")
    named = reader.get("dtype", "torch_dtype", default="float32") if requested == "auto" else requested
    if (resolved := _DTYPES.get(str(named).removeprefix("torch."))) is None:
        raise ConfigError(f"The checkpoint's dtype {named!r} is not supported: choose one with dtype, e.g. 'bfloat16'.")
    on_gpu = device == "cuda" or (device == "auto" and os.path.exists("/dev/nvidiactl"))
    if requested == "auto" and resolved == "float16" and (not on_gpu or reader.config.get("quantization_config")):
        logger.info("float16 weights run in bfloat16, for which there are kernels; see dtype")
        return "bfloat16"
    return resolved


def _resolve_max_model_len(requested: int | None, derived: int, learned: bool) -> int:
    if requested is not None and requested > derived:
        what = "positions that the model has learned" if learned else "tokens that the model supports"
        scale = "" if learned else ", or scale the model's positions with hf_overrides={'rope_scaling': ...}"
        raise ConfigError(
            f"max_model_len = {requested} is more than the {derived} {what}: lower it to {derived} at most{scale}."
        )
    return derived if requested is None else requested
