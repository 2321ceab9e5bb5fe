"""The contract of a weight format: create the weights, load a checkpoint tensor into them, multiply with them.

A linear layer or an embedding is given one when it is built and calls nothing else. A format knows one matrix at a
time; it must not know models, nor which layer it serves.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MatrixShape:
    """A matrix [out_features, in_features] and whether a bias [out_features] is added to its products."""

    in_features: int
    out_features: int
    bias: bool = False


class QuantizationMethod(ABC):
    """How matrices of weights are kept. Holds no weights itself: one object serves every layer of a model.

    `weights` is always what `create_weights` returned for the same shape.
    """

    filled: frozenset[str] = frozenset()  # checkpoint tensors that are there from the start and need no loading

    @abstractmethod
    def create_weights(self, shape: MatrixShape, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters, by name, allocated and not yet filled; `dtype` is the activations'."""

    def checkpoint_shapes(self, shape: MatrixShape) -> dict[str, tuple[int, ...]]:
        """What a checkpoint must hold for such a matrix: tensor name -> shape. Here: unquantized weights."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (shape.out_features, shape.in_features)}
        return shapes | {"bias": (shape.out_features,)} if shape.bias else shapes

    @abstractmethod
    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, name: str, loaded: Tensor, start: int) -> None:
        """Put the checkpoint tensor `name` into the output features from `start` on.

        A merged layer is loaded in parts, in any order; the tensor's shape has been checked against
        `checkpoint_shapes` of that part.
        """

    @abstractmethod
    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        """[M, in_features] -> [M, out_features], with the bias where there is one; a row depends on that row alone.

        wide: the result may be float32 whatever the type of x, where that costs nothing (logits).
        """

    @abstractmethod
    def lookup(self, weights: Mapping[str, Tensor], shape: MatrixShape, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix, [T] -> [T, in_features] in `dtype`, for an embedding."""
