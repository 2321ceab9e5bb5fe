"""The contract of a weight format: create the weights, load a checkpoint's tensors into them, multiply with them.

What it does unless a format says otherwise is done with weights as they are in the checkpoint.

A linear layer or an embedding is given one when it is built and calls nothing else. A format knows one matrix at a
time and must not know models; which layers it serves is `WeightFormats`' business.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire import ops


@dataclass(frozen=True)
class MatrixShape:
    """A matrix [out_features, in_features] and whether a bias [out_features] is added to its products.

    `parts`: output features of each part of a merged one, by name.
    """

    in_features: int
    out_features: int
    bias: bool = False
    parts: Mapping[str, int] = field(default_factory=dict, compare=False)


FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class TensorForm:
    """What a checkpoint's tensor must be like.

    Attributes:
        dtypes: any of them will do.
        num_weights: where the shape does not say it: that of blocks counts bytes.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    num_weights: int | None = None


@dataclass(frozen=True)
class CheckpointSlot:
    """The place of one checkpoint tensor in a module.

    Attributes:
        name: of the tensor, as the modules' names have it.
        form: what it must be like in the checkpoint.
        load: copies it into the module's parameters.
        filled: it is there already.
    """

    name: str
    form: TensorForm
    load: Callable[[Tensor], object]
    filled: bool = False


class QuantizationMethod:
    """How matrices of weights are kept. Holds no weights itself: one object serves every layer of a model.

    `weights` is always what `create_weights` returned for the same shape. Here: `weight` [out, in] and, where the layer
    has one, `bias` [out], multiplied by torch.
    """

    filled: frozenset[str] = frozenset()  # checkpoint tensors that are there from the start and need no loading

    suits_experts = False  # whether its weights are what `quire.ops.Experts` says: many are multiplied at once

    def create_weights(self, shape: MatrixShape, dtype: torch.dtype, name: str = "") -> dict[str, Tensor]:
        """The parameters, by name, allocated and not yet filled.

        Args:
            dtype: the activations'.
            name: the layer's, by which its weights can be kept and found again.
        """
        forms = self.checkpoint_tensors(shape)
        return {tensor: torch.empty(form.shape, dtype=dtype) for tensor, form in forms.items()}

    def of_part(self, name: str) -> "QuantizationMethod":
        """What a checkpoint's tensors of this part of a merged matrix are like."""
        return self

    def checkpoint_tensors(self, shape: MatrixShape) -> dict[str, TensorForm]:
        """What a checkpoint must hold for such a matrix, by tensor name. Here: unquantized weights."""
        forms = {"weight": TensorForm((shape.out_features, shape.in_features))}
        return forms | {"bias": TensorForm((shape.out_features,))} if shape.bias else forms

    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, loaded: Tensor, start: int) -> None:
        """Put a checkpoint's `weight` into the output features from `start` on.

        A merged layer is loaded in parts, in any order; the tensor has been checked against `checkpoint_tensors` of
        that part. Biases are as they are everywhere: the layer loads them.
        """
        weights["weight"][start : start + len(loaded)].copy_(loaded)

    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        """[M, in_features] -> [M, out_features], with the bias where there is one; a row depends on that row alone.

        wide: the result may be float32 whatever the type of x, where that costs nothing (logits).
        """
        return ops.linear(x, weights["weight"], weights.get("bias"), torch.float32 if wide else None)

    def operands(self, weights: Mapping[str, Tensor]) -> tuple[Any, ...] | None:
        """Those of `ops.gated_linear` after its activation, if that multiplies as `apply` does."""
        return None

    def lookup(self, weights: Mapping[str, Tensor], shape: MatrixShape, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix, [T] -> [T, in_features] in `dtype`, for an embedding."""
        return ops.embedding(ids, weights["weight"])


class Unquantized(QuantizationMethod):
    """Weights as they are in the checkpoint, in the model's dtype."""

    suits_experts = True

    def operands(self, weights: Mapping[str, Tensor]) -> tuple[Any, ...] | None:
        return weights["weight"], weights.get("bias")
