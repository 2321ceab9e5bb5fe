"""Paged attention of decodes, chunks of prompts and any mixture of them in one launch; `quire.ops.attention` says what.

A program has a tile of query rows (tokens of one sequence x the query heads of one KV head) and meets the keys it sees
in tiles of SPAN at absolute positions. Each makes one partial result (maximum, total, weighted values, all fp32); a
row's spans are added in ascending order, by the program itself or, where few programs would walk long contexts, by
`_combine` after several have made them: the same additions of the same numbers. Maxima are whole numbers in log2, so
that what is rescaled is multiplied with powers of two, which rounds nothing (the online softmax is that of
arXiv:1805.02867, the partial results those of arXiv:2311.01282). Knows no requests.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.batch import AttentionBatch
from quire.ops.rope import AttentionSpec
from quire.ops.triton.common import begin_kernel, dot, exp2, launch, narrow, widen
from quire.ops.triton.pages import Pages

SPAN = 128  # keys per tile and partial result; span j holds positions [128 j, 128 j + 128)
ROWS = 64  # of a query tile: what a warp group of Hopper multiplies at once, also for a single token
PROMPT_ROWS = 128  # on Hopper, where most tiles are full: two warp groups, with the instructions and sums of one
PROMPT_TOKENS = 32  # per sequence, from which on most tiles are full
PROGRAMS = 256  # that keep a device busy; spans are handed out until there are so many
MAX_SHARED = 224 << 10  # bytes of shared memory, almost all of a Hopper's; not all that is taken is counted here
MAX_SCRATCH = 1 << 25  # fp32 numbers of partial results: 128 MiB
STEP_ARRAYS = ["starts", "lengths", "tables", "tail_starts", "tail_slots"]  # of one upload, anywhere in it
AHEAD = 8  # partial results that are on their way at once
LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # maximum before the first visible key; finite, so never NaN


@triton.jit
def _power(exponent):
    """2 to a whole number of at most 0, exactly; 0 below the smallest normal number."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _merge(highest, total, weighted, next_highest, next_total, next_weighted):
    """Two partial results' sum: [rows], [rows], [rows, features] of each. One that saw nothing adds nothing."""
    new = tl.maximum(highest, next_highest)
    before, after = _power(highest - new), _power(next_highest - new)
    weighted = tl.fma(weighted, before[:, None], next_weighted * after[:, None])
    return new, total * before + next_total * after, weighted


@triton.jit
def _first(sinks, head, live):
    """What a row has before its first key: nothing, or a sink, which has a weight and no value."""
    highest, total = tl.zeros_like(head) + _LOWEST, tl.zeros_like(head).to(tl.float32)
    if sinks is not None:
        score = tl.load(sinks + head, live, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.ceil(score)
        total = exp2(score - highest)
    return highest, total


@triton.jit
def _sequence(starts, lengths, num_sequences, index, TOKENS: tl.constexpr, EXTRA: tl.constexpr):
    """The last sequence s with starts[s] // TOKENS + s * EXTRA <= index; where it starts and ends, and its length.

    What it would be if sequences had one token each is tried first: in decodes it is, and all loads go out at once.
    """
    guess = index // (TOKENS + EXTRA) * TOKENS + tl.minimum(index % (TOKENS + EXTRA), TOKENS - 1)
    s = tl.minimum(guess, num_sequences - 1)
    first, end = tl.load(starts + s).to(tl.int32), tl.load(starts + s + 1).to(tl.int32)
    length = tl.load(lengths + s).to(tl.int32)
    if (first // TOKENS + s * EXTRA > index) | (end // TOKENS + (s + 1) * EXTRA <= index):
        count = 0
        for low in range(0, num_sequences, 256):
            each = low + tl.arange(0, 256)
            its_first = tl.load(starts + each, each < num_sequences, other=0).to(tl.int32)
            before = (each < num_sequences) & (its_first // TOKENS + each * EXTRA <= index)
            count += tl.sum(before.to(tl.int32))
        s = count - 1
        first, end = tl.load(starts + s).to(tl.int32), tl.load(starts + s + 1).to(tl.int32)
        length = tl.load(lengths + s).to(tl.int32)
    return s, first, end, length


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
def _within(key, low, high, BOUNDED: tl.constexpr):
    """Whether keys are in [low, high]; `low` is 0 unless BOUNDED."""
    return (key >= low) & (key <= high) if BOUNDED else key <= high


@triton.jit
def _slots(key, stored, sequence, tables, table_stride, tail_starts, tail_slots, tail_stride, BLOCK_SIZE: tl.constexpr):
    """Where a tile's keys lie."""
    unsigned = key.to(tl.uint32)  # divided by one instruction
    block = tl.load(tables + sequence.to(tl.int64) * table_stride + unsigned // BLOCK_SIZE, stored, other=0)
    slot = block.to(tl.uint32) * BLOCK_SIZE + unsigned % BLOCK_SIZE
    if tail_starts is not None:
        beyond = key - tl.load(tail_starts + sequence)
        drafted = stored & (beyond >= 0) & (beyond < tail_stride)
        there = tail_slots + sequence.to(tl.int64) * tail_stride + beyond
        slot = tl.where(drafted, tl.load(there, drafted, other=0).to(tl.uint32), slot)
    return slot


@triton.jit
def _load(
    elements, scales, slot, block_stride, at, stored, column, values, dtype: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Keys and values [keys, features] of one tile, and their scales; the head begins at `at` of each block."""
    block, offset = (slot // BLOCK_SIZE).to(tl.int64) * block_stride, (slot % BLOCK_SIZE).to(tl.int32)
    place = (elements + at + column)[None, :] + (block + offset * DIM)[:, None]
    there = stored[:, None]
    if column.shape[0] > DIM:
        there = there & (column < DIM)[None, :]
    k, v = tl.load(place, there, other=0.0), tl.load(place + values, there, other=0.0)
    k_scale, v_scale = 1.0, 1.0
    if MOST > 0:  # eight bits are as many numbers of the model's type; their scales follow the products
        k, v = widen(k, dtype), widen(v, dtype)
        scale_at = scales + (block + at + BLOCK_SIZE * DIM) // 4 + offset
        k_scale = tl.load(scale_at, stored, other=0.0)[None, :]
        v_scale = tl.load(scale_at + values // 4, stored, other=0.0)[None, :]
    return k, v, k_scale, v_scale


@triton.jit
def _meet(q, k, v, k_scale, v_scale, factor, cap, key, low, high, whole, BOUNDED: tl.constexpr, CAPPED: tl.constexpr):
    """The partial result of a tile of keys and values, [keys, features]; a row sees those of [low, high].

    Where each sees the `whole` tile, nothing is compared. Products times `factor` are scores in log2.
    """
    scores = dot(q, k.trans(), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    scores *= k_scale
    if CAPPED:  # cap * tanh(scores); what they are multiplied with before and after is part of both factors
        scores *= factor
        decay = exp2(tl.abs(scores) * (-2.0 * LOG2_E))
        scores = tl.where(scores < 0.0, -cap, cap) * ((1.0 - decay) / (1.0 + decay))
    if not whole:
        visible = _within(key[None, :], low[:, None], high[:, None], BOUNDED)
        scores = tl.where(visible, scores, float("-inf"))
    peak = tl.max(scores, 1)
    if CAPPED:
        peak = tl.maximum(_LOWEST, tl.ceil(peak))
        weights = exp2(scores - peak[:, None])
    else:
        peak = tl.maximum(_LOWEST, tl.ceil(peak * factor))
        weights = exp2(tl.fma(scores, factor, -peak[:, None]))
    mass = tl.sum(weights, 1)
    acc = tl.zeros([q.shape[0], v.shape[1]], tl.float32)
    return peak, mass, dot(narrow(weights * v_scale, v.dtype), v, acc)


@triton.jit
def _keep(partial, states, at, column, live, known, DIM: tl.constexpr, highest, total, weighted):
    """Leave the partial results number `at` [rows] for `_combine`: states [.., 2], weighted values [.., features]."""
    tl.store(states + at * 2, highest, live)
    tl.store(states + at * 2 + 1, total, live)
    tl.store(partial + (at * DIM)[:, None] + column[None, :], weighted, live[:, None] & known[None, :])


@triton.jit
def _kept(
    partial, states, place, first, count, member, column, known, GROUP: tl.constexpr, DIM: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """What `_keep` has left, numbers `first` .. `first` + AHEAD - 1 at `place`: three tensors of each, in one tuple.

    Their loads wait for nothing, not for one another either; from `count` on there is nothing.
    """
    kept = ()
    for j in tl.static_range(AHEAD):
        there, at = member < tl.where(first + j < count, GROUP, 0), place + first + j
        weighted = partial + (at * DIM)[:, None] + column[None, :]
        kept += (
            tl.load(states + at * 2, there, other=_LOWEST),
            tl.load(states + at * 2 + 1, there, other=0.0),
            tl.load(weighted, there[:, None] & known[None, :], other=0.0),
        )
    return kept


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
    SPAN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    begin_kernel()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    BOUNDED: tl.constexpr = (WINDOW > 0) | (START > 0)
    # Tiles of sequence s: [starts[s] // TOKENS + s, starts[s + 1] // TOKENS + s + 1), of which the last may be empty.
    # Those that come last, which see most, are begun with.
    tile, kv_head, part = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first_row, end_row, length = _sequence(starts, lengths, num_sequences, tile, TOKENS, 1)
    num_tokens = end_row - first_row
    begin = (tile - first_row // TOKENS - sequence) * TOKENS
    if begin >= num_tokens:
        return
    # Row r of the tile: token begin + r // GROUP of the sequence's new ones, head r % GROUP of the group.
    row, column = tl.arange(0, ROWS), tl.arange(0, triton.next_power_of_2(DIM) if DIM > 16 else 16)
    token, head = begin + row // GROUP, kv_head * GROUP + row % GROUP
    live, known = (row < TOKENS * GROUP) & (token < num_tokens), column < DIM
    before = length - num_tokens
    # All that any row sees is in [low, high], and each row sees [whole_low, whole_high].
    low, whole_high = _seen(before + begin, length, WINDOW, START, CAUSAL)
    last = before + tl.minimum(begin + TOKENS, num_tokens) - 1
    whole_low, high = _seen(last, length, WINDOW, START, CAUSAL)
    row_low, row_high = _seen(before + token, length, WINDOW, START, CAUSAL)
    # Each has the spans first + part, + parts, + 2 parts .. up to that of `high`, of which there is one at least.
    first_span, last_span = low // SPAN, tl.maximum(low, high) // SPAN
    key = (first_span + part) * SPAN + tl.arange(0, SPAN)
    stored = _within(key, low, high, BOUNDED)
    slot = _slots(key, stored, sequence, tables, table_stride, tail_starts, tail_slots, tail_stride, BLOCK_SIZE)
    place = (first_row + token).to(tl.int64)
    inside = live[:, None] & known[None, :]
    q = tl.load(query + (place * query_stride + head * DIM)[:, None] + column[None, :], inside, other=0.0)

    highest, total = _first(sinks, head, live)
    weighted = tl.zeros([ROWS, column.shape[0]], tl.float32)
    for span in range(first_span + part, last_span + 1, parts):
        key = span * SPAN + tl.arange(0, SPAN)
        k, v, k_scale, v_scale = _load(
            elements, scales, slot, block_stride, kv_head * head_stride, _within(key, low, high, BOUNDED), column,
            KV_HEADS * head_stride, q.dtype, DIM, BLOCK_SIZE, MOST,
        )  # fmt: skip
        then = key + parts * SPAN
        stored = _within(then, low, high, BOUNDED)
        slot = _slots(then, stored, sequence, tables, table_stride, tail_starts, tail_slots, tail_stride, BLOCK_SIZE)
        whole = (span * SPAN >= whole_low) & (span * SPAN + SPAN - 1 <= whole_high)
        peak, mass, acc = _meet(q, k, v, k_scale, v_scale, factor, cap, key, row_low, row_high, whole, BOUNDED, CAPPED)
        if SPLIT:  # each row's spans are counted from the first that it sees
            kept = live & (span >= row_low // SPAN) & (span <= tl.maximum(row_low, row_high) // SPAN)
            at = (place * HEADS + head) * max_spans + span - row_low // SPAN
            _keep(partial, states, at, column, kept, known, DIM, peak, mass, acc)
        else:
            highest, total, weighted = _merge(highest, total, weighted, peak, mass, acc)
    if not SPLIT:
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
    member = tl.arange(0, triton.next_power_of_2(GROUP))
    column = tl.arange(0, triton.next_power_of_2(DIM))
    live, head, known = member < GROUP, kv_head * GROUP + member, column < DIM
    place = row.to(tl.int64) * HEADS + head
    highest, total = _first(sinks, head, live)
    weighted = tl.zeros([member.shape[0], column.shape[0]], tl.float32)
    # The first are on their way before it is known how many there are: there is room for all that there could be.
    ahead = _kept(partial, states, place * max_spans, 0, max_spans, member, column, known, GROUP, DIM, AHEAD)
    _, _, end_row, length = _sequence(starts, lengths, num_sequences, row, 1, 0)
    if end_row <= row:
        return
    low, high = _seen(length - end_row + row, length, WINDOW, START, CAUSAL)
    count = tl.maximum(low, high) // SPAN - low // SPAN + 1
    for first in range(0, count, AHEAD):
        now, then = ahead, first + AHEAD
        ahead = _kept(partial, states, place * max_spans, then, count, member, column, known, GROUP, DIM, AHEAD)
        for j in tl.static_range(AHEAD):
            there = first + j < count
            peak, mass = tl.where(there, now[3 * j], _LOWEST), tl.where(there, now[3 * j + 1], 0.0)
            acc = tl.where(there, now[3 * j + 2], 0.0)
            highest, total, weighted = _merge(highest, total, weighted, peak, mass, acc)
    _finish(out + (place * DIM)[:, None] + column[None, :], live[:, None] & known[None, :], total, weighted)


def paged_attention(query: Tensor, pages: Pages, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
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
    rows, span, warps, stages = _tile(query, num_sequences, pages.elements.dtype.itemsize, spec)
    num_tiles = num_tokens // (rows * spec.num_kv_heads // heads) + num_sequences
    max_spans = _most_spans(batch.block_tables.shape[1] * pages.block_size, span, spec)
    parts, kept = min(max_spans, PROGRAMS // (num_tiles * spec.num_kv_heads)), num_tokens * heads * max_spans
    if parts < 2 or kept * (spec.head_dim + 2) > MAX_SCRATCH:
        parts, kept = 1, 0
    partial, states = (query.new_empty(kept, n, dtype=torch.float32) for n in (spec.head_dim, 2))
    tails, sinks = batch.tails, spec.sinks
    factor, cap = spec.scale * LOG2_E.value, 0.0
    if spec.softcap is not None:
        factor, cap = spec.scale / spec.softcap, spec.softcap * LOG2_E.value
    shape = {"HEADS": heads, "KV_HEADS": spec.num_kv_heads, "DIM": spec.head_dim}
    shape |= {"WINDOW": spec.window or 0, "START": spec.start, "CAUSAL": spec.causal, "SPAN": span}
    launch(
        _attend,
        (num_tiles, spec.num_kv_heads, parts),
        *(query, pages.elements, pages.scales, out, partial, states, batch.query_start_loc, batch.seq_lens),
        *(batch.block_tables, tails and tails.starts, tails and tails.slots.contiguous(), sinks),
        *(num_sequences, parts, max_spans, batch.block_tables.stride(0), tails.slots.shape[1] if tails else 0),
        *(query.stride(0), pages.elements.stride(0), pages.elements.stride(2), factor, cap),
        **shape,
        **pages.constants,
        ROWS=rows,
        SPLIT=parts > 1,
        CAPPED=spec.softcap is not None,
        num_warps=warps,
        num_stages=stages if parts == 1 else 1,  # what is kept takes shared memory, too
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


def _most_spans(context: int, span: int, spec: AttentionSpec) -> int:
    """Of `span` keys, that a token can see some of, where a sequence has `context` at most."""
    spans = -(-context // span)
    return spans if spec.window is None else min(spans, (spec.window * (1 if spec.causal else 2) - 2) // span + 2)


def _tile(query: Tensor, num_sequences: int, itemsize: int, spec: AttentionSpec) -> tuple[int, int, int, int]:
    """Rows of a query tile, keys of a span, warps, and key tiles on their way.

    The second and, but for prompts on Hopper, the first follow from the model, its type and the device alone: a row's
    bits depend on them. Other devices' compilers share a tile's keys out to warps otherwise for 128 rows than for 64.
    """
    has_warp_groups, shared_bytes = _limits(query.device)
    wide = spec.head_dim > 128
    prompts = has_warp_groups and not wide and len(query) >= PROMPT_TOKENS * num_sequences
    rows = max(PROMPT_ROWS if prompts else ROWS, 1 << (spec.num_heads // spec.num_kv_heads - 1).bit_length())
    columns = 1 << (spec.head_dim - 1).bit_length()
    size = columns * query.dtype.itemsize
    span = SPAN if size <= 256 else SPAN // 2 if size <= 512 else SPAN // 4 if shared_bytes >= 128 << 10 else SPAN // 8
    room = (shared_bytes - rows * size) // (2 * span * columns * itemsize)
    if has_warp_groups and not wide and not prompts:
        room = 1  # two programs share a processor then: one loads, one computes
    return rows, span, 8 if wide or rows > ROWS else 4, max(1, min(room, 2 if wide else 3))


@cache
def _limits(device: torch.device) -> tuple[bool, int]:
    """Whether it is a Hopper, and the shared memory that is counted on; the interpreter is taken for one."""
    if device.type != "cuda":
        return True, MAX_SHARED
    properties = torch.cuda.get_device_properties(device)
    return properties.major == 9, min(properties.shared_memory_per_block_optin, MAX_SHARED)
