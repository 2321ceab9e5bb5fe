"""Checkpoints of heads: a folder of config.json and tensors, trained to draft for one model.

What drafts with heads (Medusa, EAGLE) opens and fills them here: a safetensors file is read as a model's is, and where
there is none a pickle's tensors. Must not know what heads compute.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from quire.config.model import parse_json
from quire.errors import ModelLoadError
from quire.models.dummy import DummySource
from quire.models.heads import HeadCheckpoint, fill, slot_shapes
from quire.models.pickled import SUFFIXES, PickledSource
from quire.models.safetensors import SafetensorsSource
from quire.models.weights import TensorSource


def open_heads(path: Path, name: str, *, load_format: str = "auto") -> HeadCheckpoint:
    """Read config.json, and what tensors there are.

    Raises:
        ModelLoadError: a file is missing, or damaged; the message names it.
    """
    try:
        config = parse_json(path / "config.json", f"the heads {name!r}")
    except FileNotFoundError as error:
        raise ModelLoadError(f"The heads {name!r} have no config.json; fetch it.") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"config.json of the heads {name!r} is no JSON object; fetch it again.")
    return HeadCheckpoint(name, config, _source(path, name, load_format))


def _source(path: Path, name: str, load_format: str) -> TensorSource | None:
    if any(path.glob("*.safetensors")):
        return SafetensorsSource(path, name)
    pickled = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else []
    if len(pickled) > 1:
        names = ", ".join(file.name for file in pickled)
        raise ModelLoadError(f"The heads {name!r} have {names}: leave the one that is to be read.")
    if pickled:
        return PickledSource(pickled[0])
    if load_format == "dummy":
        return None
    raise ModelLoadError(f"The heads {name!r} have no *.safetensors and no *.pt or *.bin; fetch one of them.")


def fill_heads(
    heads: nn.Module, checkpoint: HeadCheckpoint, names: Mapping[str, str | None], dtype: torch.dtype, seed: int = 0
) -> None:
    """Fill `heads`, whose weights are of `dtype`: as `quire.models.heads.fill`, or without tensors at random."""
    if checkpoint.source is None:
        shapes = slot_shapes(heads)
        checkpoint = replace(checkpoint, source=DummySource(shapes, dtype, seed))
        names = {name: name for name in shapes}
    fill(heads, checkpoint, names)
