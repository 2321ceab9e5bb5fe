"""RMSNorm and LayerNorm over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.elementwise import add, in_blocks
from quire.ops.native.builder import Value
from quire.ops.table import op


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32, rounded once (arXiv:1910.07467).

    plus_one: multiply with ``1 + weight`` instead, summed in fp32 (Gemma).
    """
    wide_weight = weight.float() + 1.0 if plus_one else weight.float()

    def norm(rows: Tensor) -> Tensor:
        wide = rows.float()
        scale = (wide * wide).mean(-1, keepdim=True).add_(eps).sqrt_()
        return (wide / scale).mul_(wide_weight)

    return in_blocks(norm, x.shape[-1], x)


@op
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of ``x + residual``, and that sum, rounded to their type."""
    total = add(x, residual)
    return rms_norm(total, weight, eps, plus_one), total


@op
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension (arXiv:1607.06450)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@op
def rms_norm_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of the first columns, as many as there are weights; those after them stay. `x` may be overwritten."""
    first, rest = x.split([len(weight), x.shape[-1] - len(weight)], -1)
    return torch.cat((rms_norm(first.contiguous(), weight, eps), rest), -1)


@rms_norm.native
def _build_rms(x: Value, weight: Tensor, eps: float, plus_one: bool = False) -> Value:
    vector = x.builder.vector(weight, x.width)
    return x.builder.append("norm", [x], x.width, weight=vector, size=x.width, eps=eps, plus_one=plus_one)


@rms_norm_first.native
def _build_first(x: Value, weight: Tensor, eps: float) -> Value:
    size = len(weight)
    return x.builder.append("norm", [x], x, weight=x.builder.vector(weight, size), size=size, eps=eps)


add_rms_norm.native(add_rms_norm.reference)  # whose parts are recorded


@layer_norm.native
def _build_layer(x: Value, weight: Tensor | None, bias: Tensor | None, eps: float) -> Value:
    factor, shift = x.builder.vector(weight, x.width), x.builder.vector(bias, x.width)
    told = {"weight": factor, "bias": shift, "size": x.width, "eps": eps, "subtract_mean": True}
    return x.builder.append("norm", [x], x.width, **told)
