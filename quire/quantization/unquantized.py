"""Weights as they are in the checkpoint, in the model's dtype, multiplied by torch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire import ops
from quire.quantization.base import MatrixShape, QuantizationMethod


class Unquantized(QuantizationMethod):
    """`weight` [out, in] and, where the layer has one, `bias` [out]."""

    suits_experts = True

    def create_weights(self, shape: MatrixShape, dtype: torch.dtype, name: str = "") -> dict[str, Tensor]:
        forms = self.checkpoint_tensors(shape)
        return {tensor: torch.empty(form.shape, dtype=dtype) for tensor, form in forms.items()}

    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, loaded: Tensor, start: int) -> None:
        weights["weight"][start : start + len(loaded)].copy_(loaded)

    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        return ops.linear(x, weights["weight"], weights.get("bias"), torch.float32 if wide else None)

    def lookup(self, weights: Mapping[str, Tensor], shape: MatrixShape, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return ops.embedding(ids, weights["weight"])
