"""Weights in the layout of the native kernels: packed, and quantized where the format says so, as they are loaded.

There is never a second copy: rows go from the mapped checkpoint straight into their tiles. What is asked of a packed
matrix is recorded in a program (`quire.ops.native.builder`); there are no tensors to multiply here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from quire import ops
from quire.ops.native.matrix import PackedMatrix, row_bytes, weight_format, weight_order
from quire.ops.native.structs import TYPE_OF, Type
from quire.quantization.base import MatrixShape, QuantizationMethod, TensorForm
from quire.quantization.coded import MADE

# (shape, dtype, name) -> zeroed memory, or what an earlier start left there under the name.
Allocate = Callable[[tuple[int, ...], torch.dtype, str], Tensor]
Weights = Mapping[str, Tensor]
_MADE = {name: made.packed for name, made in MADE.items() if made.packed is not None}  # that the kernels have


@dataclass(frozen=True)
class Packing:
    """For which kernels weights are packed, and where they live.

    Attributes:
        dtype: the model's, float32 or bfloat16.
        filled: what `allocate` returns holds the packed weights already.
        level: of the kernels that will multiply, where they are known: see `weight_order`.
    """

    dtype: torch.dtype
    allocate: Allocate
    filled: bool = False
    level: str = ""


class Packed(QuantizationMethod):
    """`packed` uint8 [blocks, tiles, bytes], `scales` float32 [out] where a type has them; `bias` [out] or none.

    Args:
        made: of MADE, a format that the kernels have; None keeps the model's own type.
        kept: the type of a checkpoint's matrices that are kept as they are, blocks or W8A8, whatever is `made`: its
            `weight` is uint8 [out, bytes of a row].
    """

    def __init__(self, made: str | None, packing: Packing, kept: Type | None = None) -> None:
        self.type, self.paired = kept or (_MADE[made] if made else TYPE_OF[packing.dtype]), False
        if packing.level and packing.dtype is torch.bfloat16:
            self.type, self.paired, _ = weight_order(packing.level, self.type)
        self._kept, self._allocate = kept is not None, packing.allocate
        self.filled = frozenset({"weight"}) if packing.filled else frozenset()

    def create_weights(self, shape: MatrixShape, dtype: torch.dtype, name: str = "") -> dict[str, Tensor]:
        data_shape = PackedMatrix.data_shape(shape.out_features, shape.in_features, self.type)
        weights = {"packed": self._allocate(data_shape, torch.uint8, f"{name}.packed")}
        if weight_format(self.type).has_scales:
            weights["scales"] = self._allocate((shape.out_features,), torch.float32, f"{name}.scales")
        if shape.bias:
            weights["bias"] = torch.empty(shape.out_features, dtype=dtype)
        return weights

    def checkpoint_tensors(self, shape: MatrixShape) -> dict[str, TensorForm]:
        forms = super().checkpoint_tensors(shape)
        if self._kept:
            rows, columns = shape.out_features, shape.in_features
            forms["weight"] = TensorForm((rows, row_bytes(self.type, columns)), (torch.uint8,), rows * columns)
        return forms

    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, loaded: Tensor, start: int) -> None:
        self.matrix(weights, shape).pack(loaded, start)

    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        return ops.linear(x, self.matrix(weights, shape), weights.get("bias"), torch.float32 if wide else None)

    def lookup(self, weights: Mapping[str, Tensor], shape: MatrixShape, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return ops.embedding(ids, self.matrix(weights, shape))

    def matrix(self, weights: Mapping[str, Tensor], shape: MatrixShape) -> PackedMatrix:
        """The packed matrix that `create_weights` made."""
        scales, sizes = weights.get("scales"), (shape.out_features, shape.in_features)
        return PackedMatrix(weights["packed"].data, scales, *sizes, self.type, self.paired)


class PackedParts(QuantizationMethod):
    """A merged matrix whose parts are of several types: neighbours of one type are a matrix with its own product."""

    def __init__(self, methods: Mapping[str, Packed]) -> None:
        """`methods`: of each part, in order."""
        self._methods = methods
        self.filled = next(iter(methods.values())).filled

    def of_part(self, name: str) -> QuantizationMethod:
        return self._methods[name]

    def create_weights(self, shape: MatrixShape, dtype: torch.dtype, name: str = "") -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for first, method, part, _ in self._matrices(shape, {}):
            made = method.create_weights(part, dtype, f"{name}.{first}")
            weights |= {f"{tensor}_{first}": weight for tensor, weight in made.items()}
        return weights | ({"bias": torch.empty(shape.out_features, dtype=dtype)} if shape.bias else {})

    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, loaded: Tensor, start: int) -> None:
        first, method, part, own = [each for each in self._matrices(shape, weights) if each[0] <= start][-1]
        method.load(own, part, loaded, start - first)

    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        parts = [method.matrix(own, part) for _, method, part, own in self._matrices(shape, weights)]
        return ops.linear(x, parts, weights.get("bias"), torch.float32 if wide else None)

    def _matrices(self, shape: MatrixShape, weights: Weights) -> Iterator[tuple[int, Packed, MatrixShape, Weights]]:
        """The first row, format, shape and weights of each."""
        first = 0
        for method, parts in groupby(shape.parts, self._methods.__getitem__):
            rows = sum(shape.parts[part] for part in parts)
            own = {name.removesuffix(f"_{first}"): each for name, each in weights.items() if name.endswith(f"_{first}")}
            yield first, method, MatrixShape(shape.in_features, rows), own
            first += rows
