"""Activations times a number. `x * factor` is the same."""

from torch import Tensor

from quire.ops.table import op


@op
def scale(x: Tensor, factor: float) -> Tensor:
    """``x * factor``, in fp32, rounded once; a factor that is to be rounded to the model's type comes rounded."""
    return x * factor


scale.native(scale.reference)  # which a builder's values record themselves
