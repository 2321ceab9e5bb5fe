"""Pickled checkpoints (.pt, .bin), as heads are published: tensors alone are taken from them, and no code is run.

A `TensorSource`, of folders that have no safetensors file. `torch.load` is asked for weights only, which refuses a file
that would make anything else. Must not know models.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.models.weights import TensorSpec

SUFFIXES = (".pt", ".bin", ".pth")


class PickledSource:
    """The tensors of one file.

    Raises:
        ModelLoadError: it can't be read, holds more than tensors by name, or such as are of no known type.
    """

    num_files = 1

    def __init__(self, path: Path) -> None:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a broken file makes the unpickler, the archive or torch raise
            raise ModelLoadError(
                f"{path} can't be read as a file of tensors ({type(error).__name__}): it is damaged, or holds "
                "more than tensors, which is refused. Fetch it again, or convert it to safetensors."
            ) from error
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout is torch.strided
            for name, tensor in found.items()
        ):
            raise ModelLoadError(f"{path} is no map from names to tensors: save a state_dict().")
        self._tensors = found
        facts = [(name, str(one.dtype), tuple(one.shape), one.nbytes) for name, one in found.items()]
        self.specs = [TensorSpec(*each, path.name) for each in facts]

    def stream(self, skip: Collection[str]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor but those named in `skip`."""
        for spec in self.specs:
            if spec.name not in skip:
                yield spec, self._tensors[spec.name]
