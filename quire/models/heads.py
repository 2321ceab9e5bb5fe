"""Heads that were trained for a model: what their checkpoint says, held against that model, and the filling of them.

A checkpoint is a config.json beside one safetensors file or more, or beside one pickled file, as heads are published.
Medusa's and EAGLE's are read through this, when the worker makes what drafts. Must not know what heads compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.config.config_json import read_json
from quire.config.families import check_drafting_method
from quire.errors import ModelLoadError
from quire.models.dummy import DummySource
from quire.models.pickled import SUFFIXES, PickledSource
from quire.models.safetensors import SafetensorsSource
from quire.models.weights import CheckpointFormat, TensorSource, weight_slots


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

    def made_for(self, method: str) -> "HeadCheckpoint":
        """Itself, unless its tensors are another drafting method's (ConfigError)."""
        names = {name.removeprefix("model.") for name in self.shapes}
        held: str | None = None
        if any("midlayer." in name or ".hidden_norm." in name for name in names):
            held = "eagle3"
        elif "fc.weight" in names:
            held = "eagle"
        elif "norm.weight" in names:
            held = "draft_model"
        check_drafting_method(method, held, self.name)
        return self

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
            if (value := self.config.get(name)) is not None:
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
    return HeadCheckpoint(name, read_json(path, "config.json", name), _source(path, name, load_format))


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


def spread_logits(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Logits [R, size] of these tokens [size] -> [R, vocab_size]; the others are never drawn."""
    out = logits.new_full((logits.shape[0], vocab_size), -torch.inf)
    if logits.device.type == "cpu":  # not by torch's indexing: waking OpenMP's threads takes longer than the copy
        out.numpy()[:, token_ids.numpy()] = logits.numpy()
        return out
    return out.index_copy_(1, token_ids.to(out.device), logits)


def fill_heads(
    heads: nn.Module, checkpoint: HeadCheckpoint, names: Mapping[str, str | None], dtype: torch.dtype, seed: int = 0
) -> None:
    """Fill the layers of `heads`, whose weights are of `dtype`, in place; without tensors at random.

    `names`: each tensor of the checkpoint -> what it is called here, or None.

    Raises:
        ModelLoadError: a tensor that `names` doesn't know, of another shape or type, or that is missing.
    """
    left, source = weight_slots(heads, CheckpointFormat(prefix="")), checkpoint.source
    if source is None:
        source = DummySource({name: slot.form.shape for name, slot in left.items()}, dtype, seed)
        names = {name: name for name in left}
    for spec in source.specs:
        if spec.name not in names:
            raise checkpoint.error(f"have a tensor {spec.name!r} in {spec.file}, for which there is no place in them.")
    with torch.no_grad():
        for spec, tensor in source.stream([name for name, ours in names.items() if ours is None]):
            if (slot := left.pop(names[spec.name] or "", None)) is None:
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
