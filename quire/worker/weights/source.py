"""Where a model's weights come from: names, what each tensor is, and the tensors one by one.

A checkpoint format is one file beside this one that makes a `TensorSource`; `quire.worker.weights.load` chooses it and
fills the model. A source must not know models, nor what becomes of its tensors.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """One tensor before it is read; `num_bytes` is what it takes in the source."""

    name: str
    dtype: str  # in safetensors' names: "F32", "BF16", ...
    shape: tuple[int, ...]
    num_bytes: int
    file: str  # its name, for messages; "" where there is none


class TensorSource(Protocol):
    """The tensors of one checkpoint, whose promises were checked when it was opened."""

    @property
    def num_files(self) -> int:
        """Files that the tensors are read from."""
        ...

    @property
    def specs(self) -> list[TensorSpec]:
        """Every tensor, in the order of `stream`."""
        ...

    def stream(self, skip: Collection[str]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor but those named in `skip`; one is only good until the next is asked for.

        Raises:
            ModelLoadError: a file can't be read; the message names it and the tensor.
        """
        ...


def first_names(names: list[str], limit: int = 5) -> str:
    """Some of `names`, for a message."""
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
