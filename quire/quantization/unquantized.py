"""Weights as they are in the checkpoint, in the model's dtype. The default of every linear layer."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire import ops
from quire.quantization.base import QuantizationMethod


class Unquantized(QuantizationMethod):
    """`weight` [out, in] and, where the layer has one, `bias` [out]."""

    def create_weights(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        shapes = self.checkpoint_shapes(in_features, out_features, bias=bias)
        return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}

    def checkpoint_shapes(self, in_features: int, out_features: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features)}
        return shapes | {"bias": (out_features,)} if bias else shapes

    def load(self, weights: Mapping[str, Tensor], name: str, loaded: Tensor, start: int) -> None:
        weights[name][start : start + loaded.shape[0]].copy_(loaded)

    def apply(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return ops.linear(x, weights["weight"], weights.get("bias"))
