"""Weights of few bits that share scales by groups of columns: a tile of them as `quire.ops.triton.linear` takes it.

Codes are expanded in registers, in float32, and rounded once. They are multiplied as weights of that type would be, in
the same order, so that results are those of the expanded matrix.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.grouped import group_size
from quire.ops.triton.common import narrow

BF16 = tl.constexpr(tl.bfloat16)
CODES = {torch.uint8: "uint4", torch.int8: "int8", torch.float8_e4m3fn: "float8"}


def group_of(weight: Tensor, scales: Tensor | None, zeros: Tensor | None, num_columns: int) -> int:
    """Columns that share a scale; 0 where weights are multiplied as they are."""
    if scales is None or (zeros is None and weight.dtype != torch.uint8):
        return 0
    return group_size(scales, num_columns)


@triton.jit
def _numbers(codes, zeros, CODES: tl.constexpr):
    """What bytes mean before they are scaled: their bits put right, which is quicker than conversions."""
    bits = codes.to(tl.int32)
    if CODES == "float8":  # exponents of float32 begin 120 lower
        return ((bits & 128) << 24 | (bits & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif CODES == "int8":  # 2^23 + 128 + code
        return (bits ^ 0x4B000080).to(tl.float32, bitcast=True) - (8388736.0 + zeros)
    else:
        return (bits ^ 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zeros)


@triton.jit
def expand(
    weight, scales, zeros, groups, start, size, num_groups,
    dtype: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Columns from `start` on of the rows that begin at `weight` [BLOCK_N], in bytes: [BLOCK_N, BLOCK_K] in `dtype`.

    groups: where in `scales` and `zeros` those of a row begin [BLOCK_N]. Without zeros all of them are 8, and weights
        are rounded to bf16 whatever `dtype` is.
    """
    SPAN: tl.constexpr = min(GROUP, BLOCK_K)
    EACH: tl.constexpr = 1 + (CODES == "uint4")  # codes of a byte
    group = (start // GROUP + tl.arange(0, BLOCK_K // SPAN))[None, :]
    byte = (start // EACH + tl.arange(0, BLOCK_K // EACH))[None, :]
    codes = tl.load(weight[:, None] + byte) if EVEN else tl.load(weight[:, None] + byte, byte * EACH < size, other=0)
    scale = tl.load(scales + groups[:, None] + group, group < num_groups, other=0.0)
    if zeros is None:
        zero = tl.full((1, 1), 8.0, tl.float32)
    else:
        zero = tl.load(zeros + groups[:, None] + group, group < num_groups, other=0).to(tl.float32)
    if CODES == "uint4":
        codes = tl.interleave(codes & 15, codes >> 4)
    codes = tl.reshape(codes, (BLOCK_N, BLOCK_K // SPAN, SPAN))
    values = _numbers(codes, zero[:, :, None], CODES) * scale[:, :, None]
    rounded = narrow(values, BF16 if zeros is None else dtype)
    return tl.reshape(rounded, (BLOCK_N, BLOCK_K)).to(dtype)
