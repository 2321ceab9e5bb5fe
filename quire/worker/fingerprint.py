"""The fingerprint of a worker's KV blocks: equal only where the same tokens make the same bytes.

The worker asks for it where blocks outlive it, on the disk. In doubt it differs: a prefix is then computed once more.
"""

import dataclasses
import hashlib
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

import quire
from quire.config.gguf import weight_files
from quire.config.model import ModelConfig
from quire.config.worker import WorkerConfig
from quire.ops.native.library import TORCH, library_path
from quire.protocol.cache import LayerCache
from quire.worker.weights.cache import content_digest

FORMAT = 1  # raised when the same tokens make other bytes for a reason that nothing below tells

# What the tokens' keys and values don't depend on, as a rule.
_INDIFFERENT = ("model", "path", "max_model_len", "generation_defaults", "eos_token_ids")


def kv_fingerprint(config: WorkerConfig, kernels: str, layers: Iterable[LayerCache]) -> bytes:
    """32 bytes of the weights, the model's own configuration, formats, layout, and what computes.

    Raises:
        OSError: the model's files can't be read.
    """
    parts = [
        f"{FORMAT} {quire.__version__}",
        repr(list(layers)),
        f"{config.quantization} {config.kv_cache_dtype} {config.load_format} {config.block_size}",
        f"{kernels} {_computer(kernels)}",
    ]
    for model in (config.model, config.draft):  # a draft model's layers are in the same blocks
        if model is not None:
            parts += _facts(model, config.load_format != "dummy")
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.digest()


def _facts(model: ModelConfig, has_weights: bool) -> list[str]:
    """A model's own configuration, and its files."""
    names = [field.name for field in dataclasses.fields(model) if field.name not in _INDIFFERENT]
    files = weight_files(model.path) if has_weights else []
    return [
        repr([(name, getattr(model, name)) for name in sorted(names)]),
        # Rotations of these follow from it.
        str(model.rope_parameters.get("rope_type") in ("dynamic", "longrope", "su") and model.max_model_len),
        repr([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]),
        content_digest(files),
    ]


def _computer(kernels: str) -> str:
    """What the bits of a sum may depend on."""
    if kernels in (TORCH, "triton"):  # whose compiler comes with torch
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        return f"torch {torch.__version__} on {platform.machine()} {processor()} {gpu}"
    return hashlib.sha256(library_path().read_bytes()).hexdigest()


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        return next((line.strip() for line in lines if line.startswith("model name")), "")  # the first core says it
    return platform.processor()
