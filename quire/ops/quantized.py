"""Products with quantized weights, whose codes are as `quire.ops.grouped` says; and a gate after these or plain ones.

The twin of what the native kernels do with their own packed matrices (`quire.ops.linear`). Knows no checkpoint.
"""

import torch
from torch import Tensor

from quire.ops.activation import Activation
from quire.ops.grouped import expand
from quire.ops.linear import linear
from quire.ops.table import op

_ROWS_AT_ONCE = 1024  # rows expanded at a time, so that the wide copies stay small


@op
def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    zeros: Tensor | None = None,
) -> Tensor:
    """`linear` with weights of fewer bits: [M, K], [N, ...], fp32 [N, scales of a row], [N] -> [M, N].

    weight: int8 or float8_e4m3fn [N, K], multiplied as they are and each sum scaled; or uint8,
        `pack_int4`'s, each multiplied by its scale and rounded to bfloat16 first.
    zeros: int8, as many as scales; then any are what `expand` makes, rounded to the type of `x`.
    """
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)
    for low in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(low, low + _ROWS_AT_ONCE)
        if zeros is None and weight.dtype != torch.uint8:  # eight bits are exact in bf16
            out[:, rows] = linear(x, weight[rows].to(x.dtype)).float() * scales[rows].t()
            continue
        dense = expand(weight[rows], scales[rows], None if zeros is None else zeros[rows], x.shape[1])
        out[:, rows] = linear(x, dense.to(torch.bfloat16 if zeros is None else x.dtype).to(x.dtype))
    return out if bias is None else out.add_(bias)


@op
def gated_linear(x: Tensor, gate: Activation, weight: Tensor, bias: Tensor | None = None, *others: Tensor) -> Tensor:
    """A gated activation of a product, [M, K] -> [M, N / 2]: of `linear`'s, or of `quantized_linear`'s.

    To the last bit what the two make, one after the other; some devices have one kernel for both.

    others: the scales of quantized weights, and their zeros if there are any.
    """
    if not others:
        return gate(linear(x, weight, bias))
    scales, *zeros = others
    return gate(quantized_linear(x, weight, scales, bias, None, *zeros))


@op
def integer_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``: int8 [M, K] x [N, K] -> float32 [M, N]; sums are exact, and rounded once if they need it."""
    return (x.double() @ weight.double().t()).float()
