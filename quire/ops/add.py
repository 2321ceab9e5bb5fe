"""Sums of activations. `x + y` is the same."""

from torch import Tensor

from quire.ops.table import op


@op
def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``: [M, N] each."""
    return x + y


add.native(add.reference)  # which a builder's values record themselves
