"""What a model's files say before anything is loaded: whether they are whole, and how much memory it will take.

`catalog` asks at the start, and `fleet` again before another model makes room. Only configuration and headers are read,
without torch, in milliseconds. The figures are near those of `quire plan`, which builds the model for them.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from quire.config.engine_args import EngineArgs, EngineConfig
from quire.config.families import built_family
from quire.config.gguf import read_gguf, weight_files
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.shards import checked_files

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class Room(NamedTuple):
    """What a loaded model takes, in bytes; as much as is known of one that can't be read."""

    weights: int = 0
    kv_cache: int = 0


def read_room(args: EngineArgs, free: float) -> tuple[EngineConfig, Room]:
    """A model's configuration, and what it takes where so many bytes are `free` for all.

    Raises:
        ConfigError, NotYetSupportedError, ModelLoadError: it could not be loaded.
    """
    config = args.resolve()
    weights = _weight_bytes(config.model, args.quantization, args.load_format)
    if config.draft is not None and config.speculative is not None:
        weights += _weight_bytes(config.draft, config.speculative.quantization, args.load_format)
    return config, Room(weights, _kv_bytes(args, config.model, free))


def _kv_bytes(args: EngineArgs, model: ModelConfig, free: float) -> int:
    if args.kv_cache_memory is not None or args.num_kv_blocks is None:
        return args.kv_cache_memory or int((args.gpu_memory_utilization or 0.0) * free)
    head = model.head_dim + 4 if args.kv_cache_dtype == "int8" else model.head_dim * _ITEM_BYTES[model.dtype]
    return 2 * model.num_layers * model.num_kv_heads * head * args.block_size * args.num_kv_blocks


def _weight_bytes(model: ModelConfig, quantization: str | None, load_format: str) -> int:
    """Of the weights in memory: in the model's type, or in codes and their scales."""
    built_family(model.architecture, model.model)
    total = 0
    if model.path.is_file():  # blocks stay blocks
        tensors = read_gguf(model.path).tensors.values()
        return 0 if load_format == "dummy" else sum(tensor.num_bytes for tensor in tensors)
    shapes = [] if load_format == "dummy" else _shapes(model.path, model.model)
    if shapes and "quantization_config" in model.hf_config:  # kept about as they are
        return sum(path.stat().st_size for path in weight_files(model.path))
    for shape in shapes:
        size = math.prod(shape)
        if quantization is None or len(shape) < 2:
            total += size * _ITEM_BYTES[model.dtype]
        elif quantization == "int8" or model.vocab_size in shape:  # tables by token keep eight bits
            total += size + 4 * shape[0]
        else:
            total += size * 9 // 16  # four bits, and two bytes for each 32
    return total


@lru_cache
def num_parameters(path: Path) -> int:
    """Of a GGUF file, or of a plain checkpoint in a directory; 0 where its files don't say, as there may be none.

    Read once: a large vocabulary stands between a GGUF file's start and its tensors.
    """
    try:
        gguf = read_gguf(path).tensors.values() if path.is_file() else ()
        return sum(map(math.prod, [tensor.shape for tensor in gguf] or _shapes(path, path.name)))
    except ModelLoadError:
        return 0


def _shapes(folder: Path, name: str) -> list[tuple[int, ...]]:
    """Of all tensors, from files that are held against their headers and against the index."""
    return [spec.shape for specs in checked_files(folder, name).values() for spec in specs]
