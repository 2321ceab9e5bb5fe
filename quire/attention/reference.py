"""The plain-torch attention backend: the specification that every other backend is tested against.

`build` keeps the step's description, which lies on the CPU wherever the cache is; the first layer of each kind
(heads, window, causal) has it cut into query tiles and key tiles, and the layers after it share the result. The
arithmetic is `quire.ops.paged_attention`. It must not know which requests the sequences belong to.
"""

from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.attention.base import AttentionBackend, AttentionBatch, AttentionSpec, SlotMoves, Tails
from quire.attention.step import Step
from quire.ops.attention import KEY_TILE, QUERY_ROWS, AttentionWork, TileGroup, TileStep

SHARED_FROM = 5  # query tiles from which a sequence is a group of its own: its tiles then share each gathered key tile
NO_WINDOW = 1 << 40  # positions: more than any sequence has
MAX_TILE_FLOATS = 1 << 19  # fp32 numbers in a group's largest transient tensor: 2 MiB, so that it stays in cache


@dataclass(frozen=True)
class _Shape:
    """What the cutting depends on besides the batch."""

    group_size: int  # query heads per KV head
    kv_width: int  # KV heads * head_dim
    window: int | None
    causal: bool = True
    start: int = 0

    @property
    def reach(self) -> int:
        """Positions after its own that a token sees at most, where not causal."""
        return NO_WINDOW if self.window is None else self.window - 1

    @property
    def query_rows(self) -> int:
        return -(-self.group_size // QUERY_ROWS) * QUERY_ROWS

    @property
    def tile_tokens(self) -> int:
        """Tokens per query tile."""
        return self.query_rows // self.group_size

    def max_items(self, shared: bool) -> int:
        """Items of a group whose keys and values, gathered for each, stay within MAX_TILE_FLOATS.

        Where they are `shared`, the items have one key tile, and their scores and outputs are what takes room.
        """
        floats = self.query_rows * max(KEY_TILE, self.kv_width) if shared else 2 * KEY_TILE * self.kv_width
        return max(1, MAX_TILE_FLOATS // floats)


@dataclass(frozen=True)
class _Items:
    """Query tiles as arrays, one entry each; the rest are absolute positions."""

    sequence: np.ndarray  # index of the sequence in the batch
    row: np.ndarray  # row of the first token
    first: np.ndarray  # position of the first token
    last: np.ndarray  # position of the last token
    low: np.ndarray  # earliest position that any of the tokens sees
    high: np.ndarray  # latest position that any of the tokens sees

    def __getitem__(self, index: slice | np.ndarray) -> "_Items":
        return _Items(*(getattr(self, f.name)[index] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.row)

    def split(self, most: int) -> "list[_Items]":
        """In order, at most so many together."""
        return [self[start : start + most] for start in range(0, len(self), most)]


@dataclass(frozen=True)
class ReferenceMetadata:
    """A step's description and the work already cut from it."""

    batch: AttentionBatch
    _work: dict[_Shape, AttentionWork] = field(default_factory=dict)

    def work(self, shape: _Shape, device: torch.device) -> AttentionWork:
        """The step's work for one kind of layer, where the cache is; cut on first use."""
        if shape not in self._work:
            self._work[shape] = _cut(self.batch, shape).to(device)
        return self._work[shape]


class ReferenceBackend(AttentionBackend):
    """Plain torch, any head size, any dtype."""

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[blocks, block_size, 2, Hkv, D]: a token's keys and values lie together and are gathered at once."""
        return (num_blocks, block_size, 2, num_kv_heads, head_dim)

    def build(self, batch: AttentionBatch) -> ReferenceMetadata:
        wide: dict[str, Tensor] = {  # torch indexes by int64 alone; work is cut on the host
            name: value.cpu().long() for name, value in vars(batch).items() if isinstance(value, Tensor)
        }
        tails = batch.tails and Tails(*(part.cpu().long() for part in batch.tails))
        return ReferenceMetadata(replace(batch, tails=tails, **wide))

    def move_slots(self, kv_cache: Tensor, moves: SlotMoves) -> None:
        tokens = kv_cache.view(-1, *kv_cache.shape[2:])
        tokens[moves.destinations.long()] = tokens[moves.sources.long()]

    def attend(self, qkv: Tensor, spec: AttentionSpec, step: Step) -> Tensor:
        metadata, cache = step.attention[spec.group], step.caches[spec.layer]
        heads = qkv.view(qkv.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        query, key, value = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if spec.q_norm is not None:
            query = ops.rms_norm(query, spec.q_norm, spec.norm_eps, spec.norm_plus_one)
        if spec.k_norm is not None:
            key = ops.rms_norm(key, spec.k_norm, spec.norm_eps, spec.norm_plus_one)
        if spec.rope is not None:
            query, key = ops.rotary(query, key, step.positions, spec.rope)
        if spec.prefix is not None and step.adapters is not None:
            kept, positions = torch.stack((key, value), 1).flatten(1), step.positions
            kept = ops.lora_rows(positions, kept, spec.prefix, step.adapters.rows, positions)
            key, value = kept.view(len(kept), 2, *key.shape[1:]).unbind(1)
        ops.write_kv(key, value, cache, metadata.batch.slot_mapping.to(cache.device))
        group_size = spec.num_heads // spec.num_kv_heads
        shape = _Shape(group_size, spec.num_kv_heads * spec.head_dim, spec.window, spec.causal, spec.start)
        return ops.paged_attention(query, cache, metadata.work(shape, cache.device), spec).reshape(qkv.shape[0], -1)


def _cut(batch: AttentionBatch, shape: _Shape) -> AttentionWork:
    """Cut a step into groups of query tiles, each with its key tiles."""
    counts = np.diff(batch.query_start_loc.numpy())
    items = _query_tiles(batch, counts, shape)
    tiles_of_sequence = -(-counts // shape.tile_tokens)
    shared = tiles_of_sequence[items.sequence] >= SHARED_FROM
    groups: list[TileGroup] = []
    # Long ones first, so that those that still have a tile are always a prefix; decodes apart from chunks, so that
    # their single token does not pay for a whole tile's softmax.
    single = items.first == items.last
    for chosen in (~shared & single, ~shared & ~single):
        part = items[np.flatnonzero(chosen)]
        part = part[np.argsort(part.low // KEY_TILE - part.high // KEY_TILE, kind="stable")]
        groups += [_separate_group(batch, few, shape) for few in part.split(shape.max_items(shared=False))]
    for sequence in np.flatnonzero(tiles_of_sequence >= SHARED_FROM):
        part = items[np.flatnonzero(items.sequence == sequence)]
        groups += [_shared_group(batch, few, shape) for few in part.split(shape.max_items(shared=True))]
    return AttentionWork(shape.query_rows, tuple(groups))


def _query_tiles(batch: AttentionBatch, counts: np.ndarray, shape: _Shape) -> _Items:
    """All query tiles of a step: each holds up to tile_tokens consecutive tokens of one sequence."""
    tokens = shape.tile_tokens
    num_tiles = -(-counts // tokens)
    sequence = np.repeat(np.arange(len(counts)), num_tiles)
    offset = (np.arange(len(sequence)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tokens
    first = (batch.seq_lens.numpy() - counts)[sequence] + offset
    last = first + np.minimum(tokens, counts[sequence] - offset) - 1
    low = np.full_like(first, shape.start) if shape.window is None else np.maximum(first - shape.window + 1, 0)
    high = last
    if not shape.causal:
        end = batch.seq_lens.numpy()[sequence] - 1
        high = end if shape.window is None else np.minimum(last + shape.window - 1, end)
    return _Items(sequence, batch.query_start_loc.numpy()[sequence] + offset, first, last, low, high)


def _separate_group(batch: AttentionBatch, items: _Items, shape: _Shape) -> TileGroup:
    """Items of many sequences, each with key tiles of its own; sorted by falling number of tiles."""
    low_tile = items.low // KEY_TILE
    num_tiles = items.high // KEY_TILE - low_tile + 1
    offsets = _token_offsets(items)
    steps = []
    for j in range(int(num_tiles[0])):
        active = items[: int(np.count_nonzero(num_tiles > j))]
        keys = (low_tile[: len(active)] + j)[:, None] * KEY_TILE + np.arange(KEY_TILE)
        slots = _slots(batch, active.sequence[:, None], np.clip(keys, active.low[:, None], active.high[:, None]))
        steps.append(_step(0, active, offsets, keys, slots, shape))
    return TileGroup(torch.from_numpy(items.row[:, None] + offsets), tuple(steps))


def _shared_group(batch: AttentionBatch, items: _Items, shape: _Shape) -> TileGroup:
    """Consecutive items of one sequence: all that see a key tile share one gathered copy of it."""
    offsets = _token_offsets(items)
    steps = []
    for tile in range(int(items.low[0]) // KEY_TILE, int(items.high[-1]) // KEY_TILE + 1):
        start = int(np.searchsorted(items.high, tile * KEY_TILE))
        stop = int(np.searchsorted(items.low, (tile + 1) * KEY_TILE))
        active = items[start:stop]
        keys = tile * KEY_TILE + np.arange(KEY_TILE)
        slots = _slots(batch, active.sequence[0], np.clip(keys, active.low[0], active.high[-1]))
        steps.append(_step(start, active, offsets[start:stop], keys[None], slots, shape))
    return TileGroup(torch.from_numpy(items.row[:, None] + offsets), tuple(steps))


def _token_offsets(items: _Items) -> np.ndarray:
    """[items, width]: the tokens of each item, counted from its first; short items repeat their last one."""
    lengths = items.last - items.first
    return np.minimum(np.arange(int(lengths.max()) + 1), lengths[:, None])


def _slots(batch: AttentionBatch, sequence: np.ndarray, positions: np.ndarray) -> np.ndarray:
    size = batch.block_size
    slots = batch.block_tables.numpy()[sequence, positions // size] * size + positions % size
    if batch.tails is not None:
        beyond = positions - batch.tails.starts.numpy()[sequence]
        tails = batch.tails.slots.numpy()
        slots = np.where(beyond < 0, slots, tails[sequence, np.clip(beyond, 0, tails.shape[1] - 1)])
    return slots.ravel()


def _step(
    start: int, active: _Items, offsets: np.ndarray, keys: np.ndarray, slots: np.ndarray, shape: _Shape
) -> TileStep:
    """The step in which the items from `start` on meet keys [items or 1, KEY_TILE]; masks only those that must be."""
    # Beyond what the first of its tokens sees, or beyond the end that a token of a layer without order sees.
    partial = keys[:, -1] > (active.first if shape.causal else np.minimum(active.first + shape.reach, active.high))
    if shape.window is not None:
        partial |= keys[:, 0] <= active.last - shape.window
    partial |= keys[:, 0] < shape.start
    stop = start + len(active)
    masked = np.flatnonzero(partial)
    if not len(masked):
        return TileStep(start, stop, torch.from_numpy(slots), start, start, None)
    part = slice(int(masked[0]), int(masked[-1]) + 1)
    queries = (active.first[part, None] + offsets[: len(active)][part])[:, :, None]
    keys = (keys if len(keys) == 1 else keys[part])[:, None, :]
    hidden = keys > (queries if shape.causal else np.minimum(queries + shape.reach, active.high[part, None, None]))
    if shape.window is not None:
        hidden |= keys <= queries - shape.window
    hidden |= keys < shape.start
    hidden = np.repeat(hidden, shape.group_size, axis=1)
    first, last = start + part.start, start + part.stop
    return TileStep(start, stop, torch.from_numpy(slots), first, last, torch.from_numpy(hidden))
