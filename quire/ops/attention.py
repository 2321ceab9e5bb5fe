"""Paged attention: in plain torch, exact by construction, with one tile shape and one order; and recorded.

The reference attention backend cuts a step into the index tensors of `AttentionWork`. All products
have QUERY_ROWS rows and KEY_TILE keys, and a query meets the key tiles (cut at absolute positions) in ascending order
with an online softmax (arXiv:1805.02867) in fp32. A tile that a query cannot see changes nothing, bit for bit, so it
does not matter which other queries or which surplus tiles are computed beside it. Knows no requests.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.native.builder import Value
from quire.ops.rope import AttentionSpec
from quire.ops.table import op

QUERY_ROWS = 16  # rows of a query tile (more when one KV head serves more query heads); a multiple of 16 keeps
# every tile aligned to a cache line
KEY_TILE = 64  # keys per tile; tile j holds positions [64 j, 64 j + 64), whatever the block size
VALUE_COLUMNS = 8  # of narrower ends some CPUs' libraries sum one row of a tile in another order than the next
_LOWEST = torch.finfo(torch.float32).min  # running maximum before the first visible key; finite, so never NaN


@dataclass(frozen=True)
class TileStep:
    """One key tile of some of a group's items.

    Attributes:
        start, stop: the items [start, stop) of the group that meet a key tile in this step.
        slots: int64 [sources * KEY_TILE], the cache slot of each key. sources is 1 (all items are queries of one
            sequence and share the tile) or stop - start (a tile per item). Hidden keys have the slot of some written
            one, so that what was never written is never read.
        masked_start, masked_stop: the items, within the group, that cannot see all of their tile.
        hidden: bool [masked items, width * group size, KEY_TILE], True where a query must not see a key; None where
            every item sees all.
    """

    start: int
    stop: int
    slots: Tensor
    masked_start: int
    masked_stop: int
    hidden: Tensor | None


@dataclass(frozen=True)
class TileGroup:
    """Query tiles ("items") that are computed together.

    Attributes:
        rows: int64 [items, width], the query row of each token; a short item repeats its last one.
        steps: key tiles in ascending order.
    """

    rows: Tensor
    steps: tuple[TileStep, ...]


@dataclass(frozen=True)
class AttentionWork:
    """All that attention needs to know of a step, for one shape of heads and one window.

    Attributes:
        query_rows: rows of a query tile: QUERY_ROWS, or as many as the query heads of one KV head need.
    """

    query_rows: int
    groups: tuple[TileGroup, ...]

    def to(self, device: torch.device) -> "AttentionWork":
        """The same with its tensors there."""

        def step(one: TileStep) -> TileStep:
            hidden = None if one.hidden is None else one.hidden.to(device)
            return replace(one, slots=one.slots.to(device), hidden=hidden)

        groups = [TileGroup(group.rows.to(device), tuple(map(step, group.steps))) for group in self.groups]
        return self if device.type == "cpu" else replace(self, groups=tuple(groups))


@op
def paged_attention(query: Tensor, kv_cache: Tensor, work: AttentionWork, spec: AttentionSpec) -> Tensor:
    """Attend to cached keys and values.

    Args:
        query: [T, Hq, D].
        kv_cache: [blocks, block_size, 2, Hkv, D], keys then values; the step's own are written already.
        work: which query meets which slots; covers every row of `query`.
        spec: whose scale, softcap and sinks scores are made with.

    Returns:
        [T, Hq, D], in the dtype of `query`.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    slots = kv_cache.view(-1, *kv_cache.shape[2:])
    for group in work.groups:
        rows = group.rows.flatten().to(query.device)
        out.index_copy_(0, rows, _attend(query.index_select(0, rows), slots, group, work.query_rows, spec))
    return out


def _attend(query: Tensor, slots: Tensor, group: TileGroup, query_rows: int, spec: AttentionSpec) -> Tensor:
    """Attention of one group: query [items * width, Hq, D] -> the same shape; slots is the cache as [slots, 2, Hkv, D].

    Inside, tensors are [Hkv, items, row, ...]: row = token * group size + query head within its KV head's group.
    """
    num_items, width = group.rows.shape
    num_kv_heads, head_dim = slots.shape[2:]
    group_size = query.shape[1] // num_kv_heads
    used = width * group_size  # rows above are padding: they are multiplied, and nothing else
    # Queries as columns: the product with keys as rows is the faster one.
    columns = query.new_zeros((num_kv_heads, num_items, head_dim, query_rows), dtype=torch.float32)
    split = query.view(num_items, width, num_kv_heads, group_size, head_dim)
    columns[..., :used].unflatten(3, (width, group_size)).copy_(split.permute(2, 0, 4, 1, 3))
    columns.mul_(spec.scale)
    highest = columns.new_full((num_kv_heads, num_items, used, 1), _LOWEST)
    total = torch.zeros_like(highest)
    if spec.sinks is not None:  # the first of all keys: the maximum so far, with a weight of 1
        highest.view(num_kv_heads, num_items, width, group_size).copy_(spec.sinks.view(num_kv_heads, 1, 1, group_size))
        total.fill_(1.0)
    weighted = columns.new_zeros((num_kv_heads, num_items, used, head_dim))
    for step in group.steps:
        items = slice(step.start, step.stop)
        keys, values = _gather(slots, step.slots.to(slots.device))
        weights = columns.new_zeros((num_kv_heads, step.stop - step.start, query_rows, KEY_TILE))
        visible = weights[:, :, :used]
        visible.copy_(_tile_product(keys, columns[:, items])[..., :used].transpose(2, 3))
        if spec.softcap is not None:
            visible.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if step.hidden is not None:
            masked = slice(step.masked_start - step.start, step.masked_stop - step.start)
            visible[:, masked].masked_fill_(step.hidden.to(slots.device), -torch.inf)
        new_highest = torch.maximum(highest[:, items], visible.amax(-1, keepdim=True))
        visible.sub_(new_highest).exp_()
        decay = (highest[:, items] - new_highest).exp_()
        total[:, items].mul_(decay).add_(visible.sum(-1, keepdim=True))
        weighted[:, items].mul_(decay).add_(_tile_product(weights, values)[:, :, :used, :head_dim])
        highest[:, items] = new_highest
    result = weighted.div_(total).unflatten(2, (width, group_size))
    return result.permute(1, 2, 0, 3, 4).to(query.dtype).reshape(query.shape)


def _gather(slots: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in fp32, each [Hkv, sources, KEY_TILE, D]; values padded with zeros to whole VALUE_COLUMNS."""
    picked = slots.index_select(0, index).view(-1, KEY_TILE, *slots.shape[1:])
    shape = (2, slots.shape[2], picked.shape[0], KEY_TILE, slots.shape[3])
    both = picked.new_empty(shape, dtype=torch.float32)
    both.copy_(picked.permute(2, 3, 0, 1, 4))
    missing = -slots.shape[3] % VALUE_COLUMNS
    return both[0], F.pad(both[1], (0, missing)) if missing else both[1]


def _tile_product(a: Tensor, b: Tensor) -> Tensor:
    """[Hkv, N, X, Y] x [Hkv, N, Y, Z] -> [Hkv, N, X, Z]; where one of them has N = 1, all items share its tile."""
    num_items = max(a.shape[1], b.shape[1])
    if a.shape[1] == b.shape[1]:
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
    out = a.new_empty((a.shape[0], num_items, a.shape[2], b.shape[3]))
    for head in range(a.shape[0]):  # a batch stride of 0 shares the tile without a copy, but only within one head
        torch.bmm(a[head].expand(num_items, -1, -1), b[head].expand(num_items, -1, -1), out=out[head])
    return out


def attend(query: Value, spec: AttentionSpec) -> Value:
    """Record causal attention to a layer's cache: query [T, Hq D], or wider (what follows is not read), -> [T, Hq D].

    Raises:
        ValueError: heads or sinks that don't fit.
    """
    builder, sinks = query.builder, spec.sinks
    if sinks is not None and sinks.shape != (spec.num_heads,):
        raise ValueError(f"sinks must be [{spec.num_heads}], got {tuple(sinks.shape)}")
    return builder.append(
        "attention",
        [query],
        spec.num_heads * spec.head_dim,
        needs_step=True,
        heads=spec.heads(),
        sinks=None if sinks is None else builder.address(sinks.float().contiguous()),
        window=spec.window or -spec.start,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
    )
