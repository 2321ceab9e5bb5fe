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
from quire.quantization.base import MatrixShape, QuantizationMethod

GROUP = 32  # columns that share a scale in int4
_SCALE_DIVISORS = tuple(-(8.0 - 0.25 * (i - 2)) for i in range(9))  # candidates: the largest value's code, -8.5 .. -6.5
_ROWS_AT_ONCE = 1024  # rows quantized or expanded at a time, so that the fp32 copies stay small


class WeightOnly(QuantizationMethod):
    """`codes` int8 [out, in], `scales` [out, 1 or groups] and, where the layer has one, `bias` [out].

    Args:
        name: "int8", "int4" or "w8a8".
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.bits = 4 if name == "int4" else 8

    def create_weights(self, shape: MatrixShape, dtype: torch.dtype, name: str = "") -> dict[str, Tensor]:
        groups = 1 if self.bits == 8 else -(-shape.in_features // GROUP)
        weights = {
            "codes": torch.empty(shape.out_features, shape.in_features, dtype=torch.int8),
            "scales": torch.empty(shape.out_features, groups),
        }
        return weights | ({"bias": torch.empty(shape.out_features, dtype=dtype)} if shape.bias else {})

    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, name: str, loaded: Tensor, start: int) -> None:
        if name == "bias":
            super().load(weights, shape, name, loaded, start)
            return
        quantize = quantize_int8 if self.bits == 8 else quantize_int4
        for low in range(0, loaded.shape[0], _ROWS_AT_ONCE):
            codes, scales = quantize(loaded[low : low + _ROWS_AT_ONCE].float())
            rows = slice(start + low, start + low + codes.shape[0])
            weights["codes"][rows].copy_(codes)
            weights["scales"][rows].copy_(scales)

    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        if self.name == "w8a8":
            return self._multiply_integers(weights, x)
        out = x.new_empty(x.shape[0], shape.out_features)
        for low in range(0, shape.out_features, _ROWS_AT_ONCE):
            rows = slice(low, low + _ROWS_AT_ONCE)
            if self.bits == 8:  # integers are exact in bf16: multiply first, then scale
                part = ops.linear(x, weights["codes"][rows].to(x.dtype)).float() * weights["scales"][rows].t()
            else:
                dense = self._expand(weights["codes"][rows], weights["scales"][rows])
                part = ops.linear(x, dense.to(torch.bfloat16).to(x.dtype))
            out[:, rows] = part.to(x.dtype)
        return out if not shape.bias else out.add_(weights["bias"])

    def _multiply_integers(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        codes, scales = quantize_int8(x.float())
        sums = codes.double() @ weights["codes"].double().t()  # which are exact
        out = sums.float() * scales * weights["scales"].t()
        return (out if "bias" not in weights else out + weights["bias"]).to(x.dtype)

    def lookup(self, weights: Mapping[str, Tensor], shape: MatrixShape, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self._expand(weights["codes"][ids], weights["scales"][ids]).to(dtype)

    def _expand(self, codes: Tensor, scales: Tensor) -> Tensor:
        if self.bits == 8:
            return codes * scales
        return codes * scales.repeat_interleave(GROUP, dim=1)[:, : codes.shape[1]]


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
    best_scale = torch.zeros_like(extreme)
    best_codes = torch.zeros_like(padded)
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
