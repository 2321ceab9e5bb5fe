"""How a matrix becomes codes and scales: to the nearest, by GPTQ (arXiv:2210.17323), or with AWQ's scales (2306.00978).

`quire.entrypoints.cli.quantize_model` calls it for each matrix. What inputs are like is one Hessian [K, K], the mean
of x xᵀ: the error of the products is then that of the weights, weighed by it. Must not know models or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Parts of a group's range that are tried: a few clipped weights may cost less than coarser steps for all.
SHRINKS = tuple(1.0 - 0.03 * i for i in range(12))
_BLOCK = 128  # columns whose errors GPTQ hands on together
_RATIOS = 20  # of AWQ's search


@dataclass(frozen=True)
class Scheme:
    """What is made of each matrix.

    Attributes:
        method: "gptq", "awq", "int4", "int8" or "fp8".
        group_size: columns of a row that share a scale; 0 for all of them.
        scale_dtype: of scales, as they are written.
        desc_act: GPTQ goes through columns by falling activity, so that the important ones have no errors to bear.
        damp: what GPTQ adds to the Hessian's diagonal, as a part of its mean.
    """

    method: str
    bits: int
    group_size: int
    scale_dtype: torch.dtype
    desc_act: bool = False
    damp: float = 0.01

    @property
    def calibrates(self) -> bool:
        """Whether it has to know inputs."""
        return self.method in ("gptq", "awq")


@dataclass(frozen=True)
class Codes:
    """A matrix [N, K] as ``(codes - zeros) * scales``.

    Attributes:
        codes: int32 from 0 on, or float8 [N, K].
        scales, zeros: float32 (of the scheme's type) and int32 [N, G].
        groups: int64 [K], each column's among the G.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    def expand(self) -> Tensor:
        """The weights that these stand for, float32 [N, K]."""
        return (self.codes.float() - self.zeros[:, self.groups]) * self.scales[:, self.groups]


def quantize(matrix: Tensor, scheme: Scheme, hessian: Tensor) -> Codes:
    """The codes of a matrix float32 [N, K]; the Hessian is all zeros where nothing is known of its inputs."""
    if scheme.method == "fp8":
        return to_fp8(matrix, scheme.scale_dtype)
    if scheme.method == "gptq" and hessian.any():
        return gptq(matrix, hessian, scheme)
    return nearest(matrix, scheme, hessian if scheme.method == "awq" and hessian.any() else None)


def to_fp8(matrix: Tensor, scale_dtype: torch.dtype) -> Codes:
    """Each row as float8 (e4m3), its largest magnitude as the largest of those."""
    most = torch.finfo(torch.float8_e4m3fn).max
    scales = (matrix.abs().amax(1, keepdim=True) / most).clamp(min=1e-7).to(scale_dtype).float()
    codes = (matrix / scales).clamp(-most, most).to(torch.float8_e4m3fn)
    return Codes(codes, scales, torch.zeros(scales.shape, dtype=torch.int32), torch.zeros(matrix.shape[1]).long())


def nearest(matrix: Tensor, scheme: Scheme, hessian: Tensor | None, shrinks: Sequence[float] = SHRINKS) -> Codes:
    """Each weight to the nearest code of its group's grid."""
    rows, columns = matrix.shape
    size = scheme.group_size or columns
    groups = matrix.reshape(rows, -1, size).transpose(0, 1)  # [G, N, size]
    blocks = None
    if hessian is not None:
        blocks = torch.stack([hessian[i : i + size, i : i + size] for i in range(0, columns, size)])
    scales, zeros = _fit(groups, scheme, blocks, shrinks)
    codes = _codes(groups, scales, zeros, scheme.bits).int().transpose(0, 1).reshape(rows, columns)
    return Codes(codes, scales[..., 0].t(), zeros[..., 0].t().int(), torch.arange(columns) // size)


def gptq(matrix: Tensor, hessian: Tensor, scheme: Scheme) -> Codes:
    """Column by column, with each one's error made good by those that are still to come."""
    rows, columns = matrix.shape
    size = scheme.group_size or columns
    order = hessian.diagonal().argsort(descending=True, stable=True) if scheme.desc_act else torch.arange(columns)
    work, inverse = matrix.t()[order].contiguous(), _inverse(hessian[order][:, order], scheme.damp)
    codes = torch.empty(columns, rows, dtype=torch.int32)
    scales, zeros = torch.empty(-(-columns // size), rows), torch.empty(-(-columns // size), rows, dtype=torch.int32)
    scale = zero = work[0]  # until the first group's
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        errors = torch.empty(stop - start, rows)
        for i in range(start, stop):
            if i % size == 0:
                scale, zero = (each[:, 0] for each in _fit(work[i : i + size].t(), scheme, None, SHRINKS))
                scales[i // size], zeros[i // size] = scale, zero.int()
            code = _codes(work[i], scale, zero, scheme.bits)
            codes[i] = code.int()
            errors[i - start] = error = (work[i] - (code - zero) * scale) / inverse[i, i]
            work[i + 1 : stop].addr_(inverse[i, i + 1 : stop], error, alpha=-1)
        work[stop:].addmm_(inverse[start:stop, stop:].t(), errors, alpha=-1)
    back = order.argsort()
    return Codes(codes[back].t(), scales.t(), zeros.t(), (torch.arange(columns) // size)[back])


def search_scales(matrices: Sequence[tuple[Tensor, Tensor]], activity: Tensor, scheme: Scheme) -> Tensor:
    """What to multiply the columns of all matrices by, float32 [K], and divide their inputs by.

    Args:
        matrices: weights [N, K], each with the Hessian of its inputs.
        activity: mean magnitude of each input [K].
    """
    best, best_error = torch.ones_like(activity), torch.inf
    for i in range(_RATIOS):
        scales = activity.clamp(min=float(activity.mean()) * 1e-4 + 1e-30) ** (i / _RATIOS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = 0.0
        for matrix, hessian in matrices:
            off = nearest(matrix * scales, scheme, None, (1.0,)).expand() / scales - matrix
            error += float(((off @ hessian) * off).sum())
        if error < best_error:
            best, best_error = scales, error
    return best


def _fit(groups: Tensor, scheme: Scheme, blocks: Tensor | None, shrinks: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Scales and zeros [..., N, 1] of groups [..., N, K], of the least error as `blocks` [..., K, K] weigh it."""
    most = 2**scheme.bits - 1
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    if scheme.method != "awq":  # symmetric
        high = torch.maximum(-low, high)
        low = -high
    least, best_scale, best_zero = torch.full_like(low, torch.inf), torch.ones_like(low), torch.ones_like(low)
    for shrink in shrinks:
        scale = ((high - low) * (shrink / most)).clamp(min=1e-7).to(scheme.scale_dtype).float()
        zero = torch.full_like(low, 2.0 ** (scheme.bits - 1))
        if scheme.method == "awq":
            zero = (-low * shrink / scale).round().clamp(0, most)
        off = (_codes(groups, scale, zero, scheme.bits) - zero) * scale - groups
        error = (off * (off if blocks is None else off @ blocks)).sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _codes(values: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    return ((values / scales).round() + zeros).clamp(0, 2**bits - 1)


def _inverse(hessian: Tensor, damp: float) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse; damped more where that is not definite."""
    mean = hessian.diagonal().mean()
    while True:
        factor, failed = torch.linalg.cholesky_ex(hessian + torch.eye(len(hessian)) * (damp * mean))
        upper, also = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if not failed and not also:
            return upper
        damp *= 10
