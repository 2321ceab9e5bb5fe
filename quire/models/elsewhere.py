"""The weights of what another stage of the model computes: there are none here, and nothing multiplies with them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.quantization.base import MatrixShape, QuantizationMethod, TensorForm


class Elsewhere(QuantizationMethod):
    """No parameters, and no tensors of the checkpoint."""

    def create_weights(self, shape: MatrixShape, dtype: torch.dtype, name: str = "") -> dict[str, Tensor]:
        return {}

    def checkpoint_tensors(self, shape: MatrixShape) -> dict[str, TensorForm]:
        return {}

    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, loaded: Tensor, start: int) -> None:
        raise AssertionError("another stage has these weights")

    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        raise AssertionError("another stage computes this")

    def lookup(self, weights: Mapping[str, Tensor], shape: MatrixShape, ids: Tensor, dtype: torch.dtype) -> Tensor:
        raise AssertionError("another stage computes this")
