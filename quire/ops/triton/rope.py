"""Between a merged projection and attention, in one launch: norms of heads, rotation, the write to the paged cache.

A program has some tokens of one head. Arithmetic is that of `quire.ops.norm.rms_norm` and `quire.ops.rope.rotary`: in
fp32, rounded to the model's type after each. Called by the attention backend; knows no sequences.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.lora import AdaptedRows, LoraLayer, VirtualRows
from quire.ops.rope import AttentionSpec
from quire.ops.triton.common import INTERPRETED, begin_kernel, launch, narrow
from quire.ops.triton.pages import Pages

TOKENS = 16  # per program, whatever their number: the tile's shape decides in which order a norm sums


@triton.jit
def _head(rows, live, angles, weight, eps, PLUS_ONE: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Heads that begin at `rows` [TOKENS], normed and rotated -> fp32 [TOKENS, columns], as if of the rows' type."""
    column = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    # Feature i < ROTARY / 2 turns with i + ROTARY / 2; those from ROTARY on stay: their partner is whatever.
    first = column < ROTARY // 2
    partner = tl.where(first, column + ROTARY // 2, column - ROTARY // 2)
    inside, turned = live & (column < DIM), live & (column < ROTARY)
    x = tl.load(rows + column, inside, other=0.0).to(tl.float32)
    y = x
    if ROTARY > 0:
        y = tl.load(rows + partner, turned, other=0.0).to(tl.float32)
    if weight is not None:
        norm = tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 1), DIM * 1.0) + eps)[:, None]
        factor = tl.load(weight + column, column < DIM, other=0.0).to(tl.float32)
        other = tl.load(weight + partner, column < ROTARY, other=0.0).to(tl.float32)
        if PLUS_ONE:
            factor, other = factor + 1.0, other + 1.0
        x = narrow(tl.div_rn(x, norm) * factor, rows.dtype.element_ty).to(tl.float32)
        y = narrow(tl.div_rn(y, norm) * other, rows.dtype.element_ty).to(tl.float32)
    if ROTARY > 0:
        at = angles + tl.where(first, column, partner)
        cos, sin = tl.load(at, turned, other=1.0), tl.load(at + ROTARY // 2, turned, other=0.0)
        x = tl.where(turned, x * cos + tl.where(first, -(y * sin), y * sin), x)
    return x


@triton.jit
def _eight(x, MOST: tl.constexpr):
    """fp32 in [-MOST, MOST], rounded to what eight bits hold, ties to even: whole numbers up to 127, e4m3 up to 448."""
    if MOST == 127:
        return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23
    elif INTERPRETED:  # its conversion rounds up to the next power of two as to the last
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        return tl.where(tl.abs(x) < 2.0**-6, (x + 24576.0) - 24576.0, near)  # 1.5 * 2^23 * 2^-9
    else:
        return x


@triton.jit
def _store(x, live, inside, to, scale_of, MOST: tl.constexpr):
    """One row of features for each token to `to` [TOKENS, columns]; in eight bits with its scale to `scale_of`."""
    if MOST > 0:
        # NaN or infinity among the features makes the scale, and so the whole token, what it should be: NaN.
        most = tl.max(tl.abs(x), 1)[:, None] + tl.sum(x * 0.0, 1)[:, None]
        x = x * tl.div_rn(MOST * 1.0, tl.where(most > 0.0, most, 1.0))
        x = _eight(tl.minimum(tl.maximum(x, -MOST * 1.0), MOST * 1.0), MOST)
        tl.store(scale_of, tl.div_rn(most, MOST * 1.0), live)
    tl.store(to, narrow(x, to.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots", "positions"])
def _prepare(
    qkv, query, elements, scales, slots, positions, cos_sin, q_norm, k_norm, num_tokens, qkv_stride, block_stride,
    head_stride, queries_ahead, eps, FIRST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, PLUS_ONE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    begin_kernel()
    head = FIRST + tl.program_id(1)  # of [0, HEADS) queries, then KV_HEADS of keys, then as many of values
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    live = token < num_tokens
    column = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    rows = qkv + token.to(tl.int64) * qkv_stride + head * DIM
    angles = cos_sin
    if ROTARY > 0:
        angles = cos_sin + tl.load(positions + token, live, other=0).to(tl.int64) * ROTARY
    if head < HEADS:
        if ROTARY > 0:
            angles += queries_ahead
        x = _head(rows, live, angles, q_norm, eps, PLUS_ONE, DIM, ROTARY)
        place = (token.to(tl.int64) * HEADS + head) * DIM + column
        tl.store(query + place, narrow(x, query.dtype.element_ty), live & (column < DIM))
    else:
        slot = tl.load(slots + token, live, other=-1)  # -1: a row that pads the batch
        live = live & (slot >= 0)
        offset = slot % BLOCK_SIZE
        at = (slot // BLOCK_SIZE).to(tl.int64) * block_stride + (head - HEADS) * head_stride
        to, scale_of = elements + at + offset * DIM + column, scales + (at + BLOCK_SIZE * DIM) // 4 + offset
        if head < HEADS + KV_HEADS:
            x = _head(rows, live, angles, k_norm, eps, PLUS_ONE, DIM, ROTARY)
        else:
            x = _head(rows, live, angles, None, eps, PLUS_ONE, DIM, 0)
        _store(x, live, live & (column < DIM), to, scale_of, MOST)


def prepare(qkv: Tensor, pages: Pages, slots: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Norm and rotate queries and keys; write keys and values to their slots.

    Args:
        qkv: [T, (Hq + 2 Hkv) D], queries first.
        slots: integers [T]; nothing is written for -1.
        positions: integers [T].

    Returns:
        The queries, [T, Hq D]; or `qkv` as it is, which they are the first columns of, where nothing is done to them.
    """
    rope, rotary = spec.rope, 0 if spec.rope is None else spec.rope.shape[-1]
    first = spec.num_heads if rope is None and spec.q_norm is None else 0
    query = qkv if first else qkv.new_empty(len(qkv), spec.num_heads * spec.head_dim)
    strides = qkv.stride(0), pages.elements.stride(0), pages.elements.stride(2)
    launch(
        _prepare,
        (triton.cdiv(len(qkv), TOKENS), spec.num_heads - first + 2 * spec.num_kv_heads),
        *(qkv, query, pages.elements, pages.scales, slots, positions, rope, spec.q_norm, spec.k_norm),
        *(len(qkv), *strides, spec.queries_ahead, spec.norm_eps),
        FIRST=first,
        HEADS=spec.num_heads,
        KV_HEADS=spec.num_kv_heads,
        DIM=spec.head_dim,
        ROTARY=rotary,
        PLUS_ONE=spec.norm_plus_one,
        TOKENS=TOKENS,
        num_warps=4,
        **pages.constants,
    )
    return query


def write_virtual(layer: LoraLayer, adapted: AdaptedRows, pages: Pages, slots: Tensor, positions: Tensor) -> None:
    """Let virtual tokens have the keys and values that their adapters give them; reads on the host.

    slots, positions: of all tokens, as for `prepare`, which has written something else.
    """
    num_kv_heads = pages.elements.shape[2]
    for place, tokens in adapted:
        for own in layer.at(place).values():
            assert isinstance(own, VirtualRows), "of keys and values adapters have virtual tokens only"
            here = tokens[positions[tokens] < len(own.rows)]
            rows = own.rows[positions[here].long()]
            as_they_are = AttentionSpec(0, num_kv_heads, rows.shape[1] // (2 * num_kv_heads), 1.0)
            prepare(rows, pages, slots[here], positions, as_they_are)
