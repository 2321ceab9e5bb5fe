"""The KV blocks as a picture for the page: how much of each part of the cache is used, and how much holds prefixes.

The live feed makes one of each snapshot. It knows blocks by their states only.
"""

from collections.abc import Sequence

import msgspec

from quire.protocol.stats import BlockGroup

_MAX_CELLS = 4_096
_CACHED, _USED = 1, 2  # bytes of EngineSnapshot.blocks
_WHOLE = bytes([0x00, 0x0F, 0xF0]).ljust(256, b"\0")  # those bytes -> cells of one block


class CellGroup(msgspec.Struct, frozen=True):
    """The cells of one of several KV groups."""

    first_cell: int
    num_blocks: int
    window: int | None  # tokens; None: full attention


class BlockMap(msgspec.Struct, frozen=True):
    """The blocks as a picture of about as many cells as can be told apart, group after group.

    Each cell is a byte: the share of its blocks that are used in the high four bits, the share that are unused but
    cached in the low four; 15 is all of them, and only none is 0.
    """

    num_free: int
    num_cached: int
    num_used: int
    blocks_per_cell: int
    cells: bytes
    groups: list[CellGroup] = []  # where there are several; a cell has blocks of one of them

    @classmethod
    def of(cls, blocks: bytes, groups: Sequence[BlockGroup] = ()) -> "BlockMap":
        """The map of `EngineSnapshot.blocks` and `block_groups`."""
        num_used, num_cached = blocks.count(_USED), blocks.count(_CACHED)
        per_cell = max(1, -(-len(blocks) // _MAX_CELLS))
        cells, placed = bytearray(), []
        begin = 0
        for group in groups or [BlockGroup(len(blocks))]:
            placed.append(CellGroup(len(cells), group.num_blocks, group.window))
            end = begin + group.num_blocks
            cells += blocks[begin:end].translate(_WHOLE) if per_cell == 1 else _cells(blocks, begin, end, per_cell)
            begin = end
        num_free = len(blocks) - num_used - num_cached
        return cls(num_free, num_cached, num_used, per_cell, bytes(cells), placed if len(placed) > 1 else [])


def _cells(blocks: bytes, begin: int, stop: int, per_cell: int) -> bytes:
    cells = bytearray()
    for start in range(begin, stop, per_cell):
        end = min(start + per_cell, stop)
        used, cached = blocks.count(_USED, start, end), blocks.count(_CACHED, start, end)
        cells.append(_share(used, end - start) << 4 | _share(cached, end - start))
    return bytes(cells)


def _share(part: int, whole: int) -> int:
    """`part` of `whole` in fifteenths, rounded up: one used block among many still shows."""
    return -(-part * 15 // whole)
