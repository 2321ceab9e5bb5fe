"""Sums of activations. `x + y` is the same."""

from torch import Tensor

from quire.ops.native.builder import Value
from quire.ops.table import op


@op
def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``: [M, N] each."""
    return x + y


@add.native
def _build(x: Value, y: Value) -> Value:
    return x.builder.add(x, y)
