"""Products with a matrix of weights, plain or quantized: the kernel of `quire.ops.linear` and `quantized_linear`.

Weights are widened tile by tile on their way to the product; a result is scaled, shifted and rounded once, and of few
rows may go through a gated activation then, which rounds again as a kernel of its own would. A program
takes tile after tile (it is persistent), neighbours at about the same time so that they find each other's rows in the
cache. In what order features are summed, and why it is one for any number of rows: `quire.ops.triton.tiles`.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.activation import Activation
from quire.ops.quantized import quantized_linear as reference
from quire.ops.triton.activation import activate, opened
from quire.ops.triton.common import begin_kernel, dot, fetch, launch, narrow, widen
from quire.ops.triton.quantized import CODES, expand, group_of
from quire.ops.triton.tiles import FEW_ROWS, choose, processors

LINES = 8  # of 128 bytes of each row of weights, that few rows' products fetch before what they multiply is there
NEIGHBOURS = 8  # tiles of rows that are taken together, for each tile of columns


@triton.jit
def multiply(
    x, mask, weight, scales, zeros, groups, size, num_groups,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] of the rows that begin at `x` [BLOCK_M, 1] and `weight` [BLOCK_N]: fp32, of int8 int32.

    With a GROUP `weight` are codes: `quire.ops.triton.quantized.expand`. TURNED: the weights are the left factor.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((BLOCK_N, BLOCK_M) if TURNED else (BLOCK_M, BLOCK_N), tl.int32 if dtype == tl.int8 else tl.float32)
    for start in range(0, size, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        a = tl.load(x + k, mask if EVEN else mask & (k < size), other=0.0)
        if GROUP:
            b = expand(
                weight, scales, zeros, groups, start, size, num_groups, dtype, BLOCK_N, BLOCK_K, EVEN, CODES, GROUP
            )
        elif EVEN:
            b = widen(tl.load(weight[:, None] + k), dtype)
        else:
            b = widen(tl.load(weight[:, None] + k, k < size, other=0.0), dtype)
        left, right = (b, tl.trans(a)) if TURNED else (a, tl.trans(b))
        sums = tl.dot(left, right, sums, out_dtype=tl.int32) if dtype == tl.int8 else dot(left, right, sums)
    return tl.trans(sums) if TURNED else sums


@triton.jit
def multiply_described(
    x, weight, row, column, size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Likewise, of the rows from `row` and `column` on of two tensors that the device's own copier knows."""
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, size, BLOCK_K):
        sums = dot(x.load([row, start]), tl.trans(weight.load([column, start])), sums)
    return sums


@triton.jit
def finish(sums, scales, bias, columns):
    """``sums * scales + bias``, of what there is, as one operation whatever the compiler makes of its neighbours."""
    if bias is not None:
        shift = tl.load(bias + columns).to(tl.float32)[None, :]
        if scales is not None:
            sums = tl.fma(sums, tl.load(scales + columns)[None, :], shift)
        else:
            sums += shift
    elif scales is not None:
        sums *= tl.load(scales + columns)[None, :]
    return sums


@triton.jit
def place(tile, tall, wide, NEIGHBOURS: tl.constexpr):
    """Of `tall` times `wide` tiles the row and column of one, such that NEIGHBOURS rows meet each column together."""
    first = tile // (NEIGHBOURS * wide) * NEIGHBOURS
    height = min(tall - first, NEIGHBOURS)
    within = tile % (NEIGHBOURS * wide)
    return first + within % height, within // height


@triton.jit
def which(column, num_columns, BLOCK_N: tl.constexpr, GATE: tl.constexpr):
    """The weights of a tile of columns, the first instead of those that are not there.

    With a GATE eight gates and the eight that they open follow each other: in what the matrix instructions of all
    devices return, a thread then has both.
    """
    i = tl.arange(0, BLOCK_N)
    if GATE is not None:
        columns = column * (BLOCK_N // 2) + i // 16 * 8 + i % 8
        return tl.where(columns < num_columns, columns + i // 8 % 2 * num_columns, 0)
    else:
        columns = column * BLOCK_N + i
        return tl.where(columns < num_columns, columns, 0)


@triton.jit
def open_gates(sums, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] of `which` weights -> [BLOCK_M, BLOCK_N // 2]."""
    pairs = tl.permute(tl.reshape(sums, (BLOCK_M, BLOCK_N // 16, 2, 8)), (0, 1, 3, 2))
    gates, others = tl.split(pairs)
    return tl.reshape(activate(gates, GATE) * opened(others, GATE), (BLOCK_M, BLOCK_N // 2))


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, weight, scales, zeros, bias, out, num_rows, num_columns, size, x_stride, weight_stride, num_groups,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, TURNED: tl.constexpr, DESCRIBED: tl.constexpr, GATE: tl.constexpr, NEIGHBOURS: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATE is not None else BLOCK_N
    tall, wide = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, WIDTH)
    if TURNED and LINES > 0:
        ahead = which(tl.program_id(0) % wide, num_columns, BLOCK_N, GATE).to(tl.int64)[:, None] * weight_stride
        fetch(weight + ahead + tl.arange(0, LINES)[None, :] * (1024 // weight.dtype.element_ty.primitive_bitwidth))
    begin_kernel()
    for tile in range(tl.program_id(0), tall * wide, tl.num_programs(0)):
        row, column = place(tile, tall, wide, NEIGHBOURS)
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        known = which(column, num_columns, BLOCK_N, GATE)
        mask = (rows < num_rows)[:, None]
        if DESCRIBED:
            sums = multiply_described(x, weight, row * BLOCK_M, column * BLOCK_N, size, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            a = x + rows.to(tl.int64)[:, None] * x_stride
            b = weight + known.to(tl.int64) * weight_stride
            g = known.to(tl.int64) * num_groups
            sums = multiply(
                a, mask, b, scales, zeros, g, size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, CODES, GROUP, TURNED
            )
        sums = finish(sums, None if GROUP else scales, bias, known)
        if GATE is not None:  # by what would have been stored
            sums = narrow(sums, out.dtype.element_ty).to(tl.float32)
            sums = open_gates(sums, GATE, BLOCK_M, BLOCK_N)
        columns = column * WIDTH + tl.arange(0, WIDTH)
        # By columns that are known to follow one another: many are stored at once.
        places = out + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(places, narrow(sums, out.dtype.element_ty), mask & (columns < num_columns)[None, :])


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    zeros: Tensor | None = None,
    gate: str = "",
) -> Tensor:
    """As `quire.ops.quantized_linear`; without scales weights are of the type of `x`.

    gate: an activation; of few rows alone, whose tiles lie in registers as `which` says.
    """
    where = processors(x.device)
    if x.dtype == torch.float32 and scales is not None and where.capability[0] == 10:
        # There Triton multiplies as TF32, whatever it is told, what it has seen widened from fewer bits.
        return reference.reference(x, weight, scales, bias, out_dtype, zeros)
    num_rows, size = x.shape
    num_columns, group = weight.shape[0] // (2 if gate else 1), group_of(weight, scales, zeros, size)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(num_rows, num_columns, dtype=out_dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    bits = 4 if weight.dtype == torch.uint8 else weight.itemsize * 8
    tiles = choose(where, num_rows, weight.shape[0], x.itemsize * 8, bits)
    described = tiles.described and scales is None and all(map(_is_even, (x, weight)))
    inputs: list[Any] = [x, weight.view(torch.uint8) if group else weight]
    if described:
        sizes = ([tiles.block_m, tiles.block_k], [tiles.block_n, tiles.block_k])
        inputs = [TensorDescriptor.from_tensor(*each) for each in zip(inputs, sizes, strict=True)]
    launch(
        *(_linear, (tiles.num_programs,)),
        *(*inputs, scales, zeros, bias, out, num_rows, num_columns, size, x.stride(0), weight.stride(0)),
        0 if scales is None else scales.shape[1],
        **tiles.constants(x),
        CODES=CODES.get(weight.dtype),
        GROUP=group,
        DESCRIBED=described,
        GATE=gate or None,
        NEIGHBOURS=NEIGHBOURS,
        LINES=LINES if tiles.turned and weight.stride(0) * weight.itemsize >= 128 * LINES else 0,
    )
    return out


def _is_even(x: Tensor) -> bool:
    """Whether the device's copier takes it: rows that begin at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0 and x.stride(1) == 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """As `quire.ops.linear`."""
    return quantized_linear(x, weight, None, bias, out_dtype)


def gated_linear(x: Tensor, gate: Activation, weight: Tensor, bias: Tensor | None = None, *others: Tensor) -> Tensor:
    """As `quire.ops.gated_linear`, of few rows by one kernel.

    In float32 two: there a kernel fuses products with their sums, and an activation's are not to be.
    """
    scales, zeros = (*others, None, None)[:2]
    if x.shape[0] > FEW_ROWS or x.dtype == torch.float32:
        return gate(quantized_linear(x, weight, scales, bias, None, zeros))
    return quantized_linear(x, weight, scales, bias, None, zeros, gate.name.removesuffix("_and_mul"))


def integer_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `quire.ops.integer_linear`."""
    return quantized_linear(x, weight, None, None, torch.float32)


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Likewise, by the vendor's library, in an order that depends on the number of rows."""
    out = F.linear(x, weight, bias)
    return out if out_dtype is None else out.to(out_dtype)
