"""Paged attention of decodes, chunks of prompts and any mixture of them in one launch; `quire.ops.attention` says what.

A program has a tile of query rows (tokens of one sequence x the query heads of one KV head) and meets the keys it sees
in tiles of KEY_TILE at absolute positions. SPAN keys at absolute positions make one partial result (maximum, total,
weighted values, all fp32); a row's spans are added in ascending order, by the program itself or, where few programs
would walk long contexts, by `_combine` after several have made them: the same additions of the same numbers. Maxima are
whole numbers in log2, so that what is rescaled is multiplied with powers of two, which rounds nothing (the online
softmax is that of arXiv:1805.02867, the partial results those of arXiv:2311.01282). Knows no requests.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from functools import cache
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.rope import AttentionSpec
from quire.ops.triton.common import begin_kernel, dot, launch, narrow, widen
from quire.ops.triton.pages import Pages

KEY_TILE = 64  # keys per tile; tile j holds positions [64 j, 64 j + 64)
SPAN = 256  # keys per partial result, whole tiles; span j holds positions [256 j, 256 j + 256)
ROWS = 64  # of a query tile: what a warp group of Hopper multiplies at once, also for a single token
PROMPT_ROWS = 128  # on Hopper, where most tiles are full: two warp groups, with the instructions and sums of one
PROMPT_TOKENS = 32  # per sequence, from which on most tiles are full
PROGRAMS = 512  # that keep a device busy; spans are handed out until there are so many
MAX_SHARED = 163 << 10  # bytes of shared memory, as much as an A100 has; not all of it is counted here
MAX_SCRATCH = 1 << 25  # fp32 numbers of partial results: 128 MiB
STEP_ARRAYS = ["starts", "lengths", "tables", "tail_starts", "tail_slots"]  # of one upload, anywhere in it
AHEAD = 8  # partial results that are on their way at once
LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # maximum before the first visible key; finite, so never NaN


class Tails(Protocol):
    """As `quire.attention.base.Tails`."""

    @property
    def starts(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...


class Batch(Protocol):
    """As `quire.attention.base.AttentionBatch`."""

    @property
    def query_start_loc(self) -> Tensor: ...
    @property
    def seq_lens(self) -> Tensor: ...
    @property
    def block_tables(self) -> Tensor: ...
    @property
    def tails(self) -> Tails | None: ...


@triton.jit
def _power(exponent):
    """2 to a whole number of at most 0, exactly; 0 below the smallest normal number."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _merge(highest, total, weighted, next_highest, next_total, next_weighted):
    """Two partial results' sum: [rows], [rows], [rows, features] of each. One that saw nothing adds nothing."""
    new = tl.maximum(highest, next_highest)
    before, after = _power(highest - new), _power(next_highest - new)
    return new, total * before + next_total * after, weighted * before[:, None] + next_weighted * after[:, None]


@triton.jit
def _first(sinks, head, live):
    """What a row has before its first key: nothing, or a sink, which has a weight and no value."""
    highest, total = tl.zeros_like(head) + _LOWEST, tl.zeros_like(head).to(tl.float32)
    if sinks is not None:
        score = tl.load(sinks + head, live, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.ceil(score)
        total = tl.exp2(score - highest)
    return highest, total


@triton.jit
def _sequence(starts, num_sequences, index, TOKENS: tl.constexpr, EXTRA: tl.constexpr):
    """The last sequence s with starts[s] // TOKENS + s * EXTRA <= index."""
    count = 0
    for low in range(0, num_sequences, 256):
        s = low + tl.arange(0, 256)
        first = tl.load(starts + s, s < num_sequences, other=0).to(tl.int32)
        count += tl.sum(((s < num_sequences) & (first // TOKENS + s * EXTRA <= index)).to(tl.int32))
    return count - 1


@triton.jit
def _seen(position, length, WINDOW: tl.constexpr, START: tl.constexpr, CAUSAL: tl.constexpr):
    """The first and the last position that a token sees, [low, high]; of a row that pads the batch, low > high."""
    low, high = position * 0 + START, position
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
    if not CAUSAL:
        high = position * 0 + length - 1
        if WINDOW > 0:
            high = tl.minimum(position + WINDOW - 1, high)
    return low, high


@triton.jit
def _place(key, stored, sequence, tables, table_stride, tail_starts, tail_slots, tail_stride, BLOCK_SIZE: tl.constexpr):
    """Where a tile's keys lie: blocks, int64, and offsets in them."""
    block = tl.load(tables + sequence.to(tl.int64) * table_stride + key // BLOCK_SIZE, stored, other=0)
    offset = key % BLOCK_SIZE
    if tail_starts is not None:
        beyond = key - tl.load(tail_starts + sequence)
        drafted = stored & (beyond >= 0) & (beyond < tail_stride)
        slot = tl.load(tail_slots + sequence.to(tl.int64) * tail_stride + beyond, drafted, other=0)
        block, offset = tl.where(drafted, slot // BLOCK_SIZE, block), tl.where(drafted, slot % BLOCK_SIZE, offset)
    return block.to(tl.int64), offset


@triton.jit
def _load(
    elements, scales, at, offset, stored, column, values, dtype: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Keys [features, keys] and values [keys, features] of one tile, and their scales; the head begins at `at`."""
    k_at, v_at, known = at + offset * DIM, at + values + offset * DIM, column < DIM
    k = tl.load(elements + k_at[None, :] + column[:, None], stored[None, :] & known[:, None], other=0.0)
    v = tl.load(elements + v_at[:, None] + column[None, :], stored[:, None] & known[None, :], other=0.0)
    k_scale, v_scale = 1.0, 1.0
    if MOST > 0:  # eight bits are as many numbers of the model's type; their scales follow the products
        k, v = widen(k, dtype), widen(v, dtype)
        scale_at = scales + (at + BLOCK_SIZE * DIM) // 4 + offset
        k_scale = tl.load(scale_at, stored, other=0.0)[None, :]
        v_scale = tl.load(scale_at + values // 4, stored, other=0.0)[None, :]
    return k, v, k_scale, v_scale


@triton.jit
def _spans(low, high, part, parts, KEY_TILE: tl.constexpr, SPAN_TILES: tl.constexpr):
    """The first span that has one of the positions [low, high], and the tiles that one of `parts` programs meets.

    It has the spans first + part, + parts, + 2 parts .. up to that of `high`; [begin, end) counts their tiles.
    """
    low_tile, high_tile = low // KEY_TILE, tl.maximum(low, high) // KEY_TILE
    first = low_tile // SPAN_TILES
    after = high_tile // SPAN_TILES - first
    begin = tl.where(part == 0, low_tile % SPAN_TILES, 0)
    end = (after - part + parts) // parts * SPAN_TILES
    return first, begin, end - tl.where(after % parts == part, SPAN_TILES - 1 - high_tile % SPAN_TILES, 0)


@triton.jit
def _scores(q, k, scale, factor, cap, CAPPED: tl.constexpr):
    """[rows, features] x [features, keys] -> [rows, keys], in log2; `scale` is 1 or each key's."""
    scores = dot(q, k, tl.zeros([q.shape[0], k.shape[1]], tl.float32)) * factor * scale
    if CAPPED:  # cap * tanh(scores); what they are multiplied with before and after is part of both factors
        decay = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E))
        scores = tl.where(scores < 0.0, -cap, cap) * ((1.0 - decay) / (1.0 + decay))
    return scores


@triton.jit
def _meet(scores, v, scale, highest, total, weighted):
    """A partial result with one more tile of keys: their scores [rows, keys], values [keys, features] and scales."""
    new = tl.maximum(highest, tl.ceil(tl.max(scores, 1)))
    weights, decay = tl.exp2(scores - new[:, None]), _power(highest - new)
    total = total * decay + tl.sum(weights, 1)
    weighted = dot(narrow(weights * scale, v.dtype), v, weighted * decay[:, None])
    return new, total, weighted


@triton.jit
def _keep(partial, states, at, column, live, known, DIM: tl.constexpr, highest, total, weighted):
    """Leave the partial results number `at` [rows] for `_combine`: states [.., 2], weighted values [.., features]."""
    tl.store(states + at * 2, highest, live)
    tl.store(states + at * 2 + 1, total, live)
    tl.store(partial + (at * DIM)[:, None] + column[None, :], weighted, live[:, None] & known[None, :])


@triton.jit
def _kept(partial, states, at, column, live, known, DIM: tl.constexpr):
    """What `_keep` has left; nothing where there is none."""
    highest = tl.load(states + at * 2, live, other=_LOWEST)
    total = tl.load(states + at * 2 + 1, live, other=0.0)
    weighted = tl.load(partial + (at * DIM)[:, None] + column[None, :], live[:, None] & known[None, :], other=0.0)
    return highest, total, weighted


@triton.jit
def _finish(out, live, total, weighted):
    """Weighted values over their weights; a row that saw nothing is 0."""
    tl.store(out, narrow(weighted / tl.where(total == 0.0, 1.0, total)[:, None], out.dtype.element_ty), live)


@triton.jit(
    do_not_specialize=["num_sequences", "parts", "table_stride", "max_spans", "tail_stride"],
    do_not_specialize_on_alignment=STEP_ARRAYS,
)
def _attend(
    query, elements, scales, out, partial, states, starts, lengths, tables, tail_starts, tail_slots, sinks,
    num_sequences, parts, max_spans, table_stride, tail_stride, query_stride, block_stride, head_stride, factor, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    START: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr,
    KEY_TILE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    begin_kernel()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    SPAN_TILES: tl.constexpr = SPAN // KEY_TILE
    # Tiles of sequence s: [starts[s] // TOKENS + s, starts[s + 1] // TOKENS + s + 1), of which the last may be empty.
    # Those that come last, which see most, are begun with.
    tile, kv_head, part = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = _sequence(starts, num_sequences, tile, TOKENS, 1)
    first_row = tl.load(starts + sequence).to(tl.int32)
    num_tokens = tl.load(starts + sequence + 1).to(tl.int32) - first_row
    begin = (tile - first_row // TOKENS - sequence) * TOKENS
    if begin >= num_tokens:
        return
    length = tl.load(lengths + sequence).to(tl.int32)
    # Row r of the tile: token begin + r // GROUP of the sequence's new ones, head r % GROUP of the group.
    row, column = tl.arange(0, ROWS), tl.arange(0, triton.next_power_of_2(DIM) if DIM > 16 else 16)
    token, head = begin + row // GROUP, kv_head * GROUP + row % GROUP
    live, known = (row < TOKENS * GROUP) & (token < num_tokens), column < DIM
    before = length - num_tokens
    low, _ = _seen(before + begin, length, WINDOW, START, CAUSAL)
    _, high = _seen(before + tl.minimum(begin + TOKENS, num_tokens) - 1, length, WINDOW, START, CAUSAL)
    row_low, row_high = _seen(before + token, length, WINDOW, START, CAUSAL)
    place = (first_row + token).to(tl.int64)
    inside = live[:, None] & known[None, :]
    q = tl.load(query + (place * query_stride + head * DIM)[:, None] + column[None, :], inside, other=0.0)

    first_span, i_begin, i_end = _spans(low, high, part, parts, KEY_TILE, SPAN_TILES)
    highest, total = _first(sinks, head, live)
    weighted = tl.zeros([ROWS, column.shape[0]], tl.float32)
    peak, mass, acc = tl.full([ROWS], _LOWEST, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros_like(weighted)
    for i in range(i_begin, i_end):
        span = first_span + part + i // SPAN_TILES * parts
        key = (span * SPAN_TILES + i % SPAN_TILES) * KEY_TILE + tl.arange(0, KEY_TILE)
        stored = (key >= low) & (key <= high)
        block, offset = _place(
            key, stored, sequence, tables, table_stride, tail_starts, tail_slots, tail_stride, BLOCK_SIZE
        )
        k, v, k_scale, v_scale = _load(
            elements, scales, block * block_stride + kv_head * head_stride, offset, stored, column,
            KV_HEADS * head_stride, q.dtype, DIM, BLOCK_SIZE, MOST,
        )  # fmt: skip
        scores = _scores(q, k, k_scale, factor, cap, CAPPED)
        visible = (key[None, :] >= row_low[:, None]) & (key[None, :] <= row_high[:, None])
        peak, mass, acc = _meet(tl.where(visible, scores, float("-inf")), v, v_scale, peak, mass, acc)
        if (i % SPAN_TILES == SPAN_TILES - 1) | (i == i_end - 1):
            if parts == 1:
                highest, total, weighted = _merge(highest, total, weighted, peak, mass, acc)
            else:  # each row's spans are counted from the first that it sees
                kept = live & (span >= row_low // SPAN) & (span <= tl.maximum(row_low, row_high) // SPAN)
                at = (place * HEADS + head) * max_spans + span - row_low // SPAN
                _keep(partial, states, at, column, kept, known, DIM, peak, mass, acc)
            peak, mass, acc = tl.zeros_like(peak) + _LOWEST, tl.zeros_like(mass), tl.zeros_like(acc)
    if parts == 1:
        _finish(out + ((place * HEADS + head) * DIM)[:, None] + column[None, :], inside, total, weighted)


@triton.jit(do_not_specialize=["num_sequences", "max_spans"], do_not_specialize_on_alignment=STEP_ARRAYS)
def _combine(
    partial, states, out, starts, lengths, sinks, num_sequences, max_spans, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, WINDOW: tl.constexpr, START: tl.constexpr, CAUSAL: tl.constexpr, SPAN: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Adds the partial results of one token's spans, for the query heads of one KV head."""
    begin_kernel()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence(starts, num_sequences, row, 1, 0)
    left = tl.load(starts + sequence + 1).to(tl.int32) - row
    if left <= 0:
        return
    length = tl.load(lengths + sequence).to(tl.int32)
    low, high = _seen(length - left, length, WINDOW, START, CAUSAL)
    count = tl.maximum(low, high) // SPAN - low // SPAN + 1
    member = tl.arange(0, triton.next_power_of_2(GROUP))
    column = tl.arange(0, triton.next_power_of_2(DIM))
    live, head, known = member < GROUP, kv_head * GROUP + member, column < DIM
    place = row.to(tl.int64) * HEADS + head
    highest, total = _first(sinks, head, live)
    weighted = tl.zeros([member.shape[0], column.shape[0]], tl.float32)
    for first in range(0, count, AHEAD):
        for j in tl.static_range(AHEAD):  # their loads need not wait for one another
            there, at = member < tl.where(count - first > j, GROUP, 0), place * max_spans + first + j
            peak, mass, acc = _kept(partial, states, at, column, there, known, DIM)
            highest, total, weighted = _merge(highest, total, weighted, peak, mass, acc)
    _finish(out + (place * DIM)[:, None] + column[None, :], live[:, None] & known[None, :], total, weighted)


def paged_attention(query: Tensor, pages: Pages, batch: Batch, spec: AttentionSpec) -> Tensor:
    """Attend to cached keys and values; neither reads a tensor on the host nor allocates by what one holds.

    Args:
        query: [T, Hq D], or wider: what follows is not read.
        pages: the step's own keys and values are written already.
        batch: sequences of 0 tokens, or of a length of 0, are inert; rows of no sequence are left as they come.

    Returns:
        [T, Hq D].
    """
    num_tokens, num_sequences, heads = len(query), len(batch.seq_lens), spec.num_heads
    out = query.new_empty(num_tokens, heads * spec.head_dim)
    if not num_tokens:
        return out
    rows, keys, warps, stages = _tile(query, num_sequences, pages.elements.dtype.itemsize, spec)
    num_tiles = num_tokens // (rows * spec.num_kv_heads // heads) + num_sequences
    max_spans = _most_spans(batch.block_tables.shape[1] * pages.block_size, spec)
    parts, kept = min(max_spans, PROGRAMS // (num_tiles * spec.num_kv_heads)), num_tokens * heads * max_spans
    if parts < 2 or kept * (spec.head_dim + 2) > MAX_SCRATCH:
        parts, kept = 1, 0
    partial, states = (query.new_empty(kept, n, dtype=torch.float32) for n in (spec.head_dim, 2))
    tails, sinks = batch.tails, spec.sinks
    factor, cap = spec.scale * LOG2_E.value, 0.0
    if spec.softcap is not None:
        factor, cap = spec.scale / spec.softcap, spec.softcap * LOG2_E.value
    shape = {"HEADS": heads, "KV_HEADS": spec.num_kv_heads, "DIM": spec.head_dim}
    shape |= {"WINDOW": spec.window or 0, "START": spec.start, "CAUSAL": spec.causal, "SPAN": SPAN}
    launch(
        _attend,
        (num_tiles, spec.num_kv_heads, parts),
        *(query, pages.elements, pages.scales, out, partial, states, batch.query_start_loc, batch.seq_lens),
        *(batch.block_tables, tails and tails.starts, tails and tails.slots.contiguous(), sinks),
        *(num_sequences, parts, max_spans, batch.block_tables.stride(0), tails.slots.shape[1] if tails else 0),
        *(query.stride(0), pages.elements.stride(0), pages.elements.stride(2), factor, cap),
        **shape,
        **pages.constants,
        KEY_TILE=keys,
        ROWS=rows,
        CAPPED=spec.softcap is not None,
        num_warps=warps,
        num_stages=stages,
    )
    if parts > 1:
        launch(
            _combine,
            (num_tokens, spec.num_kv_heads),
            *(partial, states, out, batch.query_start_loc, batch.seq_lens, sinks, num_sequences, max_spans),
            **shape,
            AHEAD=AHEAD,
            num_warps=4,
        )
    return out


def _most_spans(context: int, spec: AttentionSpec) -> int:
    """Of SPAN keys, that a token can see some of, where a sequence has `context` at most."""
    spans = -(-context // SPAN)
    return spans if spec.window is None else min(spans, (spec.window * (1 if spec.causal else 2) - 2) // SPAN + 2)


def _tile(query: Tensor, num_sequences: int, itemsize: int, spec: AttentionSpec) -> tuple[int, int, int, int]:
    """Rows of a query tile, keys of a key tile, warps, and key tiles on their way.

    The second and, but for prompts on Hopper, the first follow from the model and its type alone: a row's bits depend
    on them. Other devices' compilers share the keys of a tile out to warps otherwise for 128 rows than for 64.
    """
    has_warp_groups, shared_bytes = _limits(query.device)
    wide = spec.head_dim > 128
    prompts = has_warp_groups and not wide and len(query) >= PROMPT_TOKENS * num_sequences
    rows = max(PROMPT_ROWS if prompts else ROWS, triton.next_power_of_2(spec.num_heads // spec.num_kv_heads))
    columns = triton.next_power_of_2(spec.head_dim)
    keys = KEY_TILE if columns * query.dtype.itemsize <= 512 else KEY_TILE // 2
    room = (shared_bytes - rows * columns * query.dtype.itemsize) // (2 * keys * columns * itemsize)
    return rows, keys, 8 if wide or rows > ROWS else 4, max(1, min(room, 3))


@cache
def _limits(device: torch.device) -> tuple[bool, int]:
    """Whether it is a Hopper, and the shared memory that is counted on; the interpreter is taken for one."""
    if device.type != "cuda":
        return True, MAX_SHARED
    properties = torch.cuda.get_device_properties(device)
    return properties.major == 9, min(properties.shared_memory_per_block_optin, MAX_SHARED)
