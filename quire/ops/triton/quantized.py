"""Products with weights of four bits: the inner loop of `quire.ops.triton.linear` for them.

Two codes share a byte as `quire.ops.quantized` packs them: 32 columns in the low halves of 32 bytes, the next 32 in the
high ones, each 32 with a scale of their own. Each such half is a product by itself, in ascending order.
"""

import triton
import triton.language as tl

from quire.ops.triton.common import dot, narrow

GROUP = tl.constexpr(32)
BF16 = tl.constexpr(tl.bfloat16)


@triton.jit
def _widened(codes, scales, dtype: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """Codes [BLOCK_N, groups, GROUP], 8 more than they mean, times their scales, in bf16 -> [HALF, BLOCK_N]."""
    # The bits of 2^23 + code: a conversion of integers takes several times as long.
    numbers = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    dense = narrow(numbers * scales, BF16)
    return tl.trans(tl.reshape(dense, (BLOCK_N, HALF))).to(dtype)


@triton.jit
def multiply_packed(
    x,
    mask,
    weight,
    scales,
    size,
    num_groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] in fp32, of the rows that begin at `x` [BLOCK_M, 1], `weight` and `scales` [BLOCK_N]."""
    HALF: tl.constexpr = BLOCK_K // 2
    PAIRS: tl.constexpr = BLOCK_K // (2 * GROUP)
    within = tl.arange(0, HALF)
    low = within // GROUP * (2 * GROUP) + within % GROUP  # columns of the low halves
    pairs = tl.arange(0, PAIRS)[None, :, None]
    bytes_of = tl.arange(0, GROUP)[None, None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, size, BLOCK_K):
        k = start + low
        pair = start // (2 * GROUP) + pairs
        there = pair * 2 * GROUP < size
        codes = tl.load(weight[:, None, None] + pair * GROUP + bytes_of, there, other=0)
        first = tl.load(scales[:, None, None] + pair * 2, there, other=0.0)
        second = tl.load(scales[:, None, None] + pair * 2 + 1, pair * 2 + 1 < num_groups, other=0.0)
        if EVEN:
            a = tl.load(x + k[None, :], mask, other=0.0)
            b = tl.load(x + k[None, :] + GROUP, mask, other=0.0)
        else:
            a = tl.load(x + k[None, :], mask & (k < size)[None, :], other=0.0)
            b = tl.load(x + k[None, :] + GROUP, mask & (k + GROUP < size)[None, :], other=0.0)
        sums = dot(a, _widened(codes & 15, first, x.dtype.element_ty, BLOCK_N, HALF), sums)
        sums = dot(b, _widened(codes >> 4, second, x.dtype.element_ty, BLOCK_N, HALF), sums)
    return sums
