"""Weights as codes with scales, multiplied by torch or by a device's kernels: made here, or a checkpoint's own.

Made as the checkpoint is loaded, they are the twins of the packed formats, for machines without the kernels: "int8"
keeps one scale a row, "int4" one for 32 columns of a row; both are symmetric. "w8a8" is "int8" whose activations are
rounded to eight bits, too, with a scale for each row; "w4a8" has four bits times a small integer for 32 columns there,
which are kept here as the eight bits that they make. Codes and scales are those of csrc/pack.h; what is saved on a CPU
is memory, not time: a product expands the whole matrix first.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire import ops
from quire.ops.grouped import GROUP, expand, pack_int4
from quire.ops.native.structs import Type
from quire.quantization.base import MatrixShape, QuantizationMethod, TensorForm
from quire.quantization.grouped import KEPT, form_of_blocks, take_apart

_SCALE_DIVISORS = tuple(-(8.0 - 0.25 * (i - 2)) for i in range(9))  # candidates: the largest value's code, -8.5 .. -6.5
_ROWS_AT_ONCE = 1024  # rows made, or taken apart, at a time, so that the copies stay small
_MOST_FP8 = 448.0  # the largest number of float8_e4m3fn


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
    groups = _in_groups(rows)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales, codes = _best(groups, ((extreme / divisor).to(torch.bfloat16).float() for divisor in _SCALE_DIVISORS))
    return codes.flatten(1)[:, : rows.shape[1]].to(torch.int8), scales.squeeze(2)


def quantize_w4a8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, K] -> int8 [N, K], float32 [N, 1]: codes -8..7 times a group's -15..15, for `quantize_int4`'s."""
    own = quantize_int4(rows)[1].unsqueeze(2)
    most = own.abs().amax(1, keepdim=True)
    scale, inverse = most / 15.0, torch.where(most > 0, torch.full_like(most, 15.0) / most, torch.zeros_like(most))
    nearest, sign = (own * inverse).round().abs(), torch.where(own < 0, -1.0, 1.0)
    multiples = [(nearest + near).clamp(1, 15) * sign for near in (-1, 0, 1)]
    scales, codes = _best(_in_groups(rows), (multiple * scale for multiple in multiples))
    codes = codes * (scales * inverse).round().nan_to_num()  # where any is NaN, the row's scale is
    return codes.flatten(1)[:, : rows.shape[1]].to(torch.int8), scale.squeeze(2)


def _in_groups(rows: Tensor) -> Tensor:
    """[N, K] -> [N, groups, GROUP], zeros beyond the last column."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP)).view(len(rows), -1, GROUP)


def _best(groups: Tensor, candidates: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Of scales the first with the least squared error, NaN where a weight is NaN or infinite; and the codes -8..7."""
    error = groups.new_full((*groups.shape[:2], 1), torch.inf)
    best, best_codes = torch.full_like(error, torch.nan), torch.zeros_like(groups)
    for scale in candidates:
        inverse = torch.where(scale != 0, 1.0 / scale, torch.zeros_like(scale))
        codes = (groups * inverse).round().clamp(-8, 7)
        own_error = _sum((groups - codes * scale).square())
        better = own_error < error
        error, best = torch.where(better, own_error, error), torch.where(better, scale, best)
        best_codes = torch.where(better, codes, best_codes)
    return best, best_codes


def _sum(squares: Tensor) -> Tensor:
    """Over the last dimension, GROUP wide: halves onto halves, as csrc/pack.h, for the same codes to the last bit."""
    while squares.shape[-1] > 1:
        low, high = squares.chunk(2, dim=-1)
        squares = low + high
    return squares


class MadeFormat(NamedTuple):
    """A format that plain weights are brought to as they are loaded.

    Attributes:
        quantize: makes codes [N, K] and scales float32 [N, 1 or groups] of rows float32 [N, K].
        dtype: of codes as they are kept here; uint8 has two a byte.
        span: columns of a row that share a scale; None for all of them.
        packed: the native kernels' type of it; None where they have none.
        rounds_x: products are of integers: x is rounded to eight bits, with a scale a row.
    """

    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    dtype: torch.dtype
    span: int | None
    packed: Type | None
    rounds_x: bool = False


# By the names of `quire.config.quantized.MadeMethod`; and "fp8", which only a device without the native kernels makes.
MADE = {
    "int8": MadeFormat(quantize_int8, torch.int8, None, Type.I8),
    "int4": MadeFormat(quantize_int4, torch.uint8, GROUP, Type.I4),
    "fp8": MadeFormat(quantize_fp8, torch.float8_e4m3fn, None, None),
    "w8a8": MadeFormat(quantize_int8, torch.int8, None, Type.W8A8, rounds_x=True),
    "w4a8": MadeFormat(quantize_w4a8, torch.int8, None, Type.W4A8, rounds_x=True),
}


class Coded(QuantizationMethod):
    """`codes` [out, in] or [out, bytes], `scales` [out, 1 or groups], `zeros` likewise of KEPT ones, maybe `bias`.

    Args:
        kind: of MADE or KEPT.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self._made = kind, MADE.get(kind)
        self._dtype, self._span = (self._made.dtype, self._made.span) if self._made else KEPT[kind]
        self.suits_experts = not (self._made and self._made.rounds_x)

    def create_weights(self, shape: MatrixShape, dtype: torch.dtype, name: str = "") -> dict[str, Tensor]:
        rows, columns = shape.out_features, shape.in_features
        num_groups = 1 if self._span is None else -(-columns // self._span)
        columns = -(-columns // (2 * GROUP)) * GROUP if self._dtype == torch.uint8 else columns
        weights = {"codes": torch.empty(rows, columns, dtype=self._dtype), "scales": torch.empty(rows, num_groups)}
        if self._made is None:
            weights["zeros"] = torch.empty(rows, num_groups, dtype=torch.int8)
        return weights | ({"bias": torch.empty(rows, dtype=dtype)} if shape.bias else {})

    def checkpoint_tensors(self, shape: MatrixShape) -> dict[str, TensorForm]:
        forms = super().checkpoint_tensors(shape)
        return forms | {"weight": form_of_blocks(shape)} if self._made is None else forms

    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, loaded: Tensor, start: int) -> None:
        for part in loaded.split(_ROWS_AT_ONCE):
            rows = slice(start, start := start + len(part))
            part = part.to(weights["codes"].device)
            codes, *others = self._made.quantize(part.float()) if self._made else take_apart(part, self.kind)
            weights["codes"][rows] = pack_int4(codes) if self._dtype == torch.uint8 else codes
            for name, numbers in zip(("scales", "zeros"), others, strict=False):
                weights[name][rows] = numbers

    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        codes, scales, bias = weights["codes"], weights["scales"], weights.get("bias")
        if self._made and self._made.rounds_x:
            integers, own_scales = quantize_int8(x.float())
            out = ops.integer_linear(integers, codes) * own_scales * scales.t()
            return (out if bias is None else out + bias).to(x.dtype)
        return ops.quantized_linear(x, codes, scales, bias, torch.float32 if wide else None, weights.get("zeros"))

    def operands(self, weights: Mapping[str, Tensor]) -> tuple[Any, ...] | None:
        if self._made and self._made.rounds_x:
            return None
        others = (weights[name] for name in ("scales", "zeros") if name in weights)
        return weights["codes"], weights.get("bias"), *others

    def lookup(self, weights: Mapping[str, Tensor], shape: MatrixShape, ids: Tensor, dtype: torch.dtype) -> Tensor:
        zeros = weights["zeros"][ids] if "zeros" in weights else None
        return expand(weights["codes"][ids], weights["scales"][ids], zeros, shape.in_features).to(dtype)
