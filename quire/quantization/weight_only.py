"""Quantization in plain torch: the twins of the packed formats, for machines without the kernels.

"int8" keeps one scale a row, "int4" one for 32 columns of a row; both are symmetric and made when the checkpoint is
loaded. "w8a8" is "int8" whose activations are rounded to eight bits, too, with a scale for each row; those of the
others are not quantized. The codes and scales are those of csrc/pack.h; what is saved here is memory, not time: a
product expands the whole matrix first.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire import ops
from quire.ops.quantized import GROUP, expand_int4, pack_int4
from quire.quantization.base import MatrixShape, QuantizationMethod

_SCALE_DIVISORS = tuple(-(8.0 - 0.25 * (i - 2)) for i in range(9))  # candidates: the largest value's code, -8.5 .. -6.5
_ROWS_AT_ONCE = 1024  # rows quantized at a time, so that the fp32 copies stay small
_MOST_FP8 = 448.0  # the largest number of float8_e4m3fn


class WeightOnly(QuantizationMethod):
    """`codes` [out, in], or [out, bytes] of int4, `scales` [out, 1 or groups] and, if there is one, `bias` [out].

    Args:
        name: "int8", "int4", "fp8" or "w8a8".
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.groups = name != "w8a8"

    def create_weights(self, shape: MatrixShape, dtype: torch.dtype, name: str = "") -> dict[str, Tensor]:
        rows, columns, groups = shape.out_features, shape.in_features, 1
        kind = torch.float8_e4m3fn if self.name == "fp8" else torch.int8
        if self.name == "int4":
            groups, columns, kind = -(-columns // GROUP), -(-columns // (2 * GROUP)) * GROUP, torch.uint8
        weights = {"codes": torch.empty(rows, columns, dtype=kind), "scales": torch.empty(rows, groups)}
        return weights | ({"bias": torch.empty(rows, dtype=dtype)} if shape.bias else {})

    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, name: str, loaded: Tensor, start: int) -> None:
        if name == "bias":
            super().load(weights, shape, name, loaded, start)
            return
        quantize = {"int4": quantize_int4, "fp8": quantize_fp8}.get(self.name, quantize_int8)
        for low in range(0, loaded.shape[0], _ROWS_AT_ONCE):
            rows = loaded[low : low + _ROWS_AT_ONCE].to(weights["codes"].device)
            codes, scales = quantize(rows.float())
            codes = pack_int4(codes) if self.name == "int4" else codes
            weights["codes"][start + low : start + low + len(rows)].copy_(codes)
            weights["scales"][start + low : start + low + len(rows)].copy_(scales)

    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        if self.name == "w8a8":
            return self._multiply_integers(weights, x)
        out_dtype = torch.float32 if wide else None
        return ops.quantized_linear(x, weights["codes"], weights["scales"], weights.get("bias"), out_dtype)

    def _multiply_integers(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        codes, scales = quantize_int8(x.float())
        out = ops.integer_linear(codes, weights["codes"]) * scales * weights["scales"].t()
        return (out if "bias" not in weights else out + weights["bias"]).to(x.dtype)

    def lookup(self, weights: Mapping[str, Tensor], shape: MatrixShape, ids: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scales = weights["codes"][ids], weights["scales"][ids]
        if self.name == "int4":
            return expand_int4(codes, scales, shape.in_features).to(dtype)
        return (codes.float() * scales).to(dtype)


def quantize_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, K] -> codes float8_e4m3fn [N, K], scales float32 [N, 1]: a row's largest magnitude becomes 448."""
    scales = rows.abs().amax(1, keepdim=True) / _MOST_FP8
    return (rows / scales.clamp_min(torch.finfo(torch.float32).tiny)).to(torch.float8_e4m3fn), scales


def quantize_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, K] -> codes int8 [N, K], scales float32 [N, 1]: the largest magnitude of a row becomes 127."""
    most = rows.abs().amax(1, keepdim=True)
    most_code = torch.full_like(most, 127.0)  # a tensor: torch divides a number by multiplying with the reciprocal
    inverse = torch.where(most > 0, most_code / most, torch.zeros_like(most))
    return (rows * inverse).round().clamp(-127, 127).to(torch.int8), most / 127.0


def quantize_int4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, K] -> codes int8 [N, K] in -8..7, scales float32 [N, groups] (bf16 values): the best of 9 scales."""
    num_rows, num_columns = rows.shape
    padded = torch.nn.functional.pad(rows, (0, -num_columns % GROUP)).view(num_rows, -1, GROUP)
    extreme = padded.gather(2, padded.abs().argmax(2, keepdim=True))
    best_error = torch.full_like(extreme, torch.inf)
    best_scale, best_codes = torch.zeros_like(extreme), torch.zeros_like(padded)
    for divisor in _SCALE_DIVISORS:
        scale = (extreme / divisor).to(torch.bfloat16).float()
        inverse = torch.where(scale != 0, 1.0 / scale, torch.zeros_like(scale))
        codes = (padded * inverse).round().clamp(-8, 7)
        error = _sum((padded - codes * scale).square())
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_codes = torch.where(better, codes, best_codes)
    best_scale[best_error.isinf()] = torch.nan  # NaN or infinity among the weights shows
    return best_codes.flatten(1)[:, :num_columns].to(torch.int8), best_scale.squeeze(2)


def _sum(squares: Tensor) -> Tensor:
    """Over the last dimension, GROUP wide: halves onto halves, as csrc/pack.h, for the same codes to the last bit."""
    while squares.shape[-1] > 1:
        low, high = squares.chunk(2, dim=-1)
        squares = low + high
    return squares
