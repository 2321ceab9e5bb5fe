"""Linear layers, plain and merged.

A merged layer computes several projections of the same input in one product (query, key and value; gate and up); the
checkpoint holds them apart, as siblings of the merged layer. How weights are kept and multiplied is its
`QuantizationMethod`'s business. Models build these; `quire.models.weights` fills them.
"""

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from quire.layers.step import Step
from quire.quantization.base import MatrixShape, QuantizationMethod


class Linear(nn.Module):
    """``x @ W.T + b``: [M, in_features] -> [M, out_features].

    Args:
        outputs: number of output features, or for a merged layer those of each part: the part's name in the
            checkpoint -> features, in order.
        method: the weight format.
    """

    def __init__(
        self,
        in_features: int,
        outputs: int | Mapping[str, int],
        *,
        bias: bool,
        method: QuantizationMethod,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.parts = dict(outputs) if isinstance(outputs, Mapping) else {"": outputs}
        self.shape = MatrixShape(in_features, sum(self.parts.values()), bias)
        self.method = method
        for name, weight in method.create_weights(self.shape, dtype).items():
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The parameters by name, as the weight format made them."""
        return cast(Mapping[str, Tensor], self._parameters)

    def forward(self, x: Tensor, step: Step | None = None, *, wide: bool = False) -> Tensor:
        """See the class; `step` is None for the output head, whose rows are not a step's tokens."""
        return self.method.apply(self.weights, self.shape, x, wide=wide)

    def checkpoint_parts(self) -> Iterator[tuple[str, int, dict[str, tuple[int, ...]]]]:
        """For each part: its name ("" for a plain layer), its first output feature, and its tensors' shapes."""
        start = 0
        for part, features in self.parts.items():
            shape = MatrixShape(self.shape.in_features, features, self.shape.bias)
            yield part, start, self.method.checkpoint_shapes(shape)
            start += features

    def load(self, name: str, start: int, loaded: Tensor) -> None:
        """Take the checkpoint tensor `name` ("weight", "bias", ...) of the part whose first output is `start`."""
        self.method.load(self.weights, self.shape, name, loaded, start)
