"""Checkpoints of heads: a folder of config.json and tensors, trained to draft for one model.

What drafts with heads (Medusa, EAGLE) opens and fills them here: a safetensors file is read as a model's is, and where
there is none a pickle's tensors. Must not know what heads compute.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelLoadError
from quire.models.weights import CheckpointFormat, WeightSlot, weight_slots
from quire.worker.weights.dummy import DummySource
from quire.worker.weights.pickled import SUFFIXES, PickledSource
from quire.worker.weights.safetensors import SafetensorsSource
from quire.worker.weights.source import TensorSource

_FORM = CheckpointFormat(prefix="")


@dataclass(frozen=True)
class HeadCheckpoint:
    """A folder of heads.

    Attributes:
        name: as the user gave it.
        config: what config.json says.
        source: the tensors; none where the folder has none, which `load_format="dummy"` alone allows.
    """

    name: str
    config: dict[str, Any]
    source: TensorSource | None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor, by its name in the checkpoint."""
        return {} if self.source is None else {spec.name: spec.shape for spec in self.source.specs}

    def tensor(self, name: str) -> Tensor:
        """One of its tensors."""
        assert self.source is not None, "there are no tensors"
        [found] = [tensor.clone() for _, tensor in self.source.stream([one for one in self.shapes if one != name])]
        return found

    def error(self, complaint: str) -> ModelLoadError:
        """For what is wrong with it."""
        return ModelLoadError(f"The heads {self.name!r} {complaint}")

    def number(self, *names: str, default: int) -> int:
        """The whole number, at least 1, that config.json has under the first of `names` that is there."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if type(value) is not int or value < 1:
                    raise self.error(f"have {name} = {value!r} in config.json; it must be a whole number above 0.")
                return value
        return default

    def hold(self, what: str, value: int, of_model: int, model: str) -> None:
        """Refuse heads that have another size than the model.

        Raises:
            ModelLoadError: with both sizes and the model's name.
        """
        if value != of_model:
            raise self.error(
                f"have a {what} of {value}, and the model {model!r} one of {of_model}: they were trained for another "
                "model. Use heads that were trained for this one."
            )


def open_heads(path: Path, name: str, *, load_format: str = "auto") -> HeadCheckpoint:
    """Read config.json, and what tensors there are.

    Raises:
        ModelLoadError: a file is missing, or damaged; the message names it.
    """
    try:
        config = json.loads((path / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise ModelLoadError(f"The heads {name!r} have no config.json; fetch it.") from error
    except OSError as error:
        raise ModelLoadError(f"config.json of the heads {name!r} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"config.json of the heads {name!r} is not valid JSON ({error}); fetch it again."
        ) from error
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
    """Fill the layers of `heads`, in place.

    Args:
        names: each tensor of the checkpoint -> what it is called here, None for those that are left. Without tensors
            the weights are random, as `seed` says.
        dtype: of the heads.

    Raises:
        ModelLoadError: a tensor that `names` doesn't know, of another shape or type, or that is missing.
    """
    slots = weight_slots(heads, _FORM)
    source = checkpoint.source
    if source is None:
        source = DummySource({name: slot.form.shape for name, slot in slots.items()}, dtype, seed)
        names = {name: name for name in slots}
    left: dict[str, WeightSlot] = dict(slots)
    for spec in source.specs:
        if spec.name not in names:
            raise checkpoint.error(f"have a tensor {spec.name!r} in {spec.file}, for which there is no place in them.")
    with torch.no_grad():
        for spec, tensor in source.stream([name for name, ours in names.items() if ours is None]):
            slot = left.pop(names[spec.name] or "", None)
            if slot is None:
                raise checkpoint.error(f"have two tensors for one place; {spec.name!r} in {spec.file} is one of them.")
            if tuple(tensor.shape) != slot.form.shape or tensor.dtype not in slot.form.dtypes:
                raise checkpoint.error(
                    f"have {spec.name!r} as {spec.dtype} {list(spec.shape)} in {spec.file}, where floats "
                    f"{list(slot.form.shape)} belong: config.json and the tensors don't belong together."
                )
            slot.load(tensor)
    if left:
        theirs = {ours: name for name, ours in reversed(list(names.items()))}
        listed = ", ".join(theirs.get(name, name) for name in sorted(left)[:5])
        raise checkpoint.error(f"lack {len(left)} tensors: {listed}. They are incomplete, or of another kind.")
