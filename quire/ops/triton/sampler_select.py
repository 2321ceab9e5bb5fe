"""The first top_k tokens of rows of logits, without a sort, and ranks of tokens: kernels of the device's sampler.

Logits are ordered by bytes: how many tokens have each first byte tells the first byte of the last of the top_k, and so
on. Only the parts of a row are read that can have any of them. Launched by sampler.py.
"""

# Triton's functions say that they may return tuples, and take what they call constexpr.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from quire.ops.triton import sampler_jobs as jobs

_ABREAST = tl.constexpr(16)  # keys that each of the others is compared with at once


@triton.jit
def _key_weights(record, keys, maximum):
    x = tl.where(keys < jobs.LAST, jobs.logit_of((keys >> 32).to(tl.int32)), -jobs.INFINITY)
    return jobs.weigh(x, maximum, jobs.real(record + jobs.SCALE).to(tl.float32))


@triton.jit
def _keys_before(keys, last, listed, record, k, maximum):
    """Of each key: how many of the k listed ones up to `last` come before it, and what they weigh."""
    num, mass = tl.zeros_like(keys), tl.zeros_like(keys)
    for at in range(0, k, _ABREAST):
        places = at + tl.arange(0, _ABREAST)
        others = tl.load(listed + places, mask=places < k, other=jobs.LAST)
        weights = tl.where(others <= last, _key_weights(record, others, maximum), 0)
        before = others[None, :] < keys[:, None]
        num += tl.sum((before & (others <= last)[None, :]).to(tl.int64), 1)
        mass += tl.sum(tl.where(before, weights[None, :], 0), 1)
    return num, mass


@triton.jit
def _last_kept(listed, record, k, maximum, WIDTH: tl.constexpr):
    """The key of the last of the k listed tokens that min_weight and top_p leave."""
    places = tl.arange(0, WIDTH)
    keys = tl.load(listed + places, mask=places < k, other=jobs.LAST)
    weights = _key_weights(record, keys, maximum)
    least = tl.load(record + jobs.MIN_WEIGHT)
    last = tl.max(tl.where(keys < jobs.LAST, keys, -jobs.LAST), 0)
    if least > 0:
        num = tl.sum(((weights >= least) & (places < k)).to(tl.int64), 0)
        rank, _ = _keys_before(keys, last, listed, record, k, maximum)
        last = tl.max(tl.where(rank < num, keys, -jobs.LAST), 0)
    top_p = jobs.real(record + jobs.TOP_P)
    if top_p < 1.0:
        mass = jobs.share(tl.sum(tl.where(keys <= last, weights, 0), 0), top_p)
        _, before = _keys_before(keys, last, listed, record, k, maximum)
        last = tl.max(tl.where((before < mass) & (keys <= last), keys, -jobs.LAST), 0)
    return last


@triton.jit
def select(
    table, logits, stride, processed, maxima, cut_logits, cut_ids, lists, listed, vocab, num_parts,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    record = table + job * jobs.NUM_FIELDS
    selects = tl.load(record + jobs.SELECTS)
    most, maximum = jobs.maxima_of(maxima + job * num_parts, num_parts, PARTS)
    if (selects == jobs.NOTHING) | (jobs.is_usable(maximum) == 0):
        return
    k = tl.load(record + jobs.TOP_K).to(tl.int32)
    lists += job * num_parts
    listed += job * WIDTH
    # The k first tokens lie in the parts that fewer than k others surpass.
    parts, surpassed = tl.arange(0, PARTS), tl.zeros([PARTS], tl.int32)
    for at in range(0, num_parts, jobs.GROUP):
        others = at + tl.arange(0, jobs.GROUP)
        theirs = tl.load(maxima + job * num_parts + others, mask=others < num_parts, other=-jobs.INFINITY)
        surpassed += tl.sum((theirs[None, :] > most[:, None]).to(tl.int32), 1)
    num = jobs.list_parts((surpassed < k) & (parts < num_parts), lists, PARTS)
    # The k-th smallest order, from its first byte to its last: how many tokens have each byte after those known.
    bytes_ = tl.arange(0, 256)
    last, remaining = tl.full((), 0, tl.uint32), k
    for i in range(4):
        shift = 24 - 8 * i
        histogram = tl.zeros([256], tl.int32)
        for at in range(0, num, jobs.GROUP):
            ids, alike = jobs.group(lists, at, num, vocab)
            x = jobs.logits_of(record, logits, stride, processed, vocab, ids, alike)
            order = jobs.order_of(x).to(tl.uint32, bitcast=True) ^ 0x80000000
            alike = alike & (((order ^ last) >> shift) >> 8 == 0)
            histogram += tl.histogram(((order >> shift) & 255).to(tl.int32), 256, mask=alike)
        byte = tl.sum((tl.cumsum(histogram, 0) < remaining).to(tl.int32), 0)
        remaining -= tl.sum(tl.where(bytes_ < byte, histogram, 0), 0)
        last = last | (byte.to(tl.uint32) << shift)
    # Of those that have it, the lowest ids.
    last_order = (last ^ 0x80000000).to(tl.int32, bitcast=True)
    num_ties, num_listed, cut_id = 0, 0, 0
    for at in range(0, num, jobs.GROUP):
        ids, inside = jobs.group(lists, at, num, vocab)
        order = jobs.order_of(jobs.logits_of(record, logits, stride, processed, vocab, ids, inside))
        ties = inside & (order == last_order)
        taken = ties & (num_ties + tl.cumsum(ties.to(tl.int32), 0) <= remaining)
        num_ties += tl.sum(ties.to(tl.int32), 0)
        cut_id = tl.maximum(cut_id, tl.max(tl.where(taken, ids, 0), 0))
        if selects == jobs.LISTED:
            taken = taken | (inside & (order < last_order))
            places = num_listed + tl.cumsum(taken.to(tl.int32), 0) - 1
            keys = (order.to(tl.int64) << 32) | ids.to(tl.int64)
            tl.store(listed + places, keys, mask=taken & (places < WIDTH))
            num_listed += tl.sum(taken.to(tl.int32), 0)
    if tl.load(record + jobs.KIND) == jobs.LIST:
        return
    if selects == jobs.LISTED:
        tl.debug_barrier()
        key = _last_kept(listed, record, k, maximum, WIDTH)
        last_order, cut_id = (key >> 32).to(tl.int32), key.to(tl.int32)
    tl.store(cut_logits + job, jobs.logit_of(last_order))
    tl.store(cut_ids + job, cut_id)


@triton.jit(do_not_specialize=["num_draws"])
def rank(table, logits, stride, maxima, sums, lists, drawn, facts, num_draws, vocab, num_parts, PARTS: tl.constexpr):
    job = num_draws + tl.program_id(0).to(tl.int64)
    facts += tl.program_id(0).to(tl.int64) * 4
    record = table + job * jobs.NUM_FIELDS
    most, maximum = jobs.maxima_of(maxima + job * num_parts, num_parts, PARTS)
    if jobs.is_usable(maximum) == 0:
        tl.store(facts, 0)
        return
    logits += tl.load(record + jobs.SOURCE) * stride
    logit = tl.load(logits + tl.load(drawn + 2 * tl.load(record + jobs.ROW))).to(tl.float32)
    lists += job * num_parts
    num = jobs.reaching(most, logit, num_parts, lists, PARTS)
    above = tl.zeros([jobs.GROUP * jobs.PART], tl.int32)
    for at in range(0, num, jobs.GROUP):
        ids, inside = jobs.group(lists, at, num, vocab)
        x = tl.load(logits + ids, mask=inside, other=-jobs.INFINITY).to(tl.float32)
        above += (x > logit).to(tl.int32)
    parts = tl.arange(0, PARTS)
    total = tl.sum(tl.load(sums + job * num_parts + parts, mask=parts < num_parts, other=0), 0)
    tl.store(facts, 1 + tl.sum(above, 0).to(tl.int64))
    tl.store(facts + 1, total)
    tl.store(facts + 2, maximum.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(facts + 3, logit.to(tl.int32, bitcast=True).to(tl.int64))
