"""Safetensors checkpoints: one file, or shards with an index; every promise is checked before a tensor is read.

A `TensorSource`; `quire.models.shards` checks what the files say. Must not know models.
"""

from collections.abc import Collection, Iterator
from itertools import accumulate, groupby
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.errors import ModelLoadError
from quire.models.quantized import split_name
from quire.models.shards import TensorSpec, checked_files

_WINDOW_BYTES = 256 * 2**20  # a file is unmapped and mapped again after this much, to give its resident pages back


class SafetensorsSource:
    """The tensors of a directory's *.safetensors, in file order, but each module's together.

    Args:
        directory: the checkpoint's.
        model: its name, for messages.

    Raises:
        ModelLoadError: no weights, or files that contradict the index, each other or themselves.
    """

    def __init__(self, directory: Path, model: str) -> None:
        checked = checked_files(directory, model)
        self._files = {path: _by_module(specs) for path, specs in checked.items()}
        self.num_files = len(self._files)
        self.specs = [spec for specs in self._files.values() for spec in specs]

    def stream(self, skip: Collection[str]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor but those named in `skip`; one is only good until the next is asked for."""
        for path, specs in self._files.items():
            for window in _windows([spec for spec in specs if spec.name not in skip]):
                current = window[0]
                try:
                    with safe_open(path, framework="pt") as file:
                        for current in window:
                            yield current, file.get_tensor(current.name)
                except (SafetensorError, OSError) as error:
                    place = f"{current.name!r} {list(current.shape)}"
                    raise ModelLoadError(f"{path.name} can't be read at {place}: {error}.") from error


def _by_module(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Files are ordered by type: a matrix's scales may be far from its codes, which should not wait for them."""
    modules: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        modules.setdefault(split_name(spec.name)[0], []).append(spec)
    return [spec for module in modules.values() for spec in module]


def _windows(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Cut a file's tensors, in order, into runs of about _WINDOW_BYTES."""
    starts = accumulate((spec.num_bytes for spec in specs), initial=0)
    for _, window in groupby(zip(starts, specs, strict=False), key=lambda pair: pair[0] // _WINDOW_BYTES):
        yield [spec for _, spec in window]
