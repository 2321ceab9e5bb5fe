"""Linear layers, plain and merged.

A merged layer computes several projections of the same input in one product (query, key and value; gate and up); the
checkpoint holds them apart, as siblings of the merged layer. How weights are kept and multiplied is its
`QuantizationMethod`'s business. `quire.models.builder` makes these; `quire.models.weights` fills them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from quire.layers.step import Step
from quire.quantization.base import CheckpointSlot, MatrixShape, QuantizationMethod

Split = Literal["out", "in"]  # the dimension of a matrix that ranks share among them


@dataclass(frozen=True)
class Place:
    """Where a matrix stands in its model.

    Attributes:
        name: the layer's full name.
        method: its weight format.
        dtype: of activations.
    """

    name: str
    method: QuantizationMethod
    dtype: torch.dtype


class Matrix(nn.Module):
    """Weights of one matrix in its format, and the filling of them.

    Args:
        parts: names in the checkpoint of what its rows are merged from, as siblings of the module -> rows, in order;
            the one part of a matrix that is not merged has the name "".
    """

    def __init__(self, place: Place, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self.name = place.name
        self.shape = MatrixShape(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)
        self.method = place.method
        for name, weight in place.method.create_weights(self.shape, place.dtype, place.name).items():
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        self._waiting = {slot.name for slot in self.checkpoint_slots("") if not slot.filled}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The parameters by name, as the weight format made them."""
        return cast(Mapping[str, Tensor], self._parameters)

    def checkpoint_slots(self, path: str) -> Iterator[CheckpointSlot]:
        """The place of each of its tensors; `path` is where the module stands."""
        start = 0
        for part, features in self.parts.items():
            owner = f"{path.rpartition('.')[0]}.{part}" if part else path
            shape = MatrixShape(self.shape.in_features, features, self.shape.bias)
            for tensor, form in self.method.checkpoint_tensors(shape).items():
                load = partial(self._load, part, tensor, start)
                yield CheckpointSlot(f"{owner}.{tensor}", form, load, tensor in self.method.filled)
            start += features

    def _load(self, part: str, tensor: str, start: int, loaded: Tensor) -> None:
        self.method.load(self.weights, self.shape, tensor, loaded, start)
        if self._waiting:
            self._waiting.discard(f".{part}.{tensor}" if part else f".{tensor}")
            if not self._waiting:
                self.method.finish(self.weights, self.shape)


class Linear(Matrix):
    """``x @ W.T + b``: [M, in_features] -> [M, out_features].

    Args:
        outputs: number of output features, or those of each part of a merged layer.
        split: how ranks would share it.
    """

    def __init__(
        self,
        place: Place,
        in_features: int,
        outputs: int | Mapping[str, int],
        *,
        bias: bool = False,
        split: Split | None = None,
    ) -> None:
        super().__init__(place, in_features, outputs if isinstance(outputs, Mapping) else {"": outputs}, bias=bias)
        self.split = split

    def forward(self, x: Tensor, step: Step | None = None, *, wide: bool = False) -> Tensor:
        """See the class; `step` is None for the output head, whose rows are not a step's tokens."""
        return self.method.apply(self.weights, self.shape, x, wide=wide)
