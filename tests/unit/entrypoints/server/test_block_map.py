"""Blocks as cells that can be told apart."""

import pytest

from quire.entrypoints.server.block_map import BlockMap, CellGroup
from quire.protocol.stats import BlockGroup


def test_small_pools_are_shown_block_by_block() -> None:
    assert BlockMap.of(bytes([0, 1, 2, 2])) == BlockMap(1, 1, 2, 1, bytes([0x00, 0x0F, 0xF0, 0xF0]))
    assert BlockMap.of(bytes(3)) == BlockMap(3, 0, 0, 1, bytes(3))
    assert BlockMap.of(b"") == BlockMap(0, 0, 0, 1, b"")


def test_cells_of_large_pools_hold_shares() -> None:
    blocks = bytearray(100_000)
    blocks[0:25], blocks[25:37], blocks[99_999:] = b"\2" * 25, b"\1" * 12, b"\2"
    shown = BlockMap.of(bytes(blocks))
    assert shown.blocks_per_cell == 25
    assert len(shown.cells) == 4000
    assert (shown.num_used, shown.num_cached, shown.num_free) == (26, 12, 99_962)
    assert shown.cells[0] == 0xF0
    assert shown.cells[1] == 0x08  # 12 of 25
    assert set(shown.cells[2:-1]) == {0}
    assert shown.cells[-1] == 0x10  # one used block is never lost


def test_no_cell_stands_for_two_groups() -> None:
    groups = [BlockGroup(3), BlockGroup(2, window=8)]
    shown = BlockMap.of(bytes([2, 2, 2, 0, 1]), groups)
    assert shown == BlockMap(
        1, 1, 3, 1, bytes([0xF0, 0xF0, 0xF0, 0, 0x0F]), [CellGroup(0, 3, None), CellGroup(3, 2, 8)]
    )
    shown = BlockMap.of(b"\2" * 5_001 + bytes(3_000), [BlockGroup(5_001), BlockGroup(3_000, window=8)])
    assert shown.blocks_per_cell == 2
    assert shown.cells == b"\xf0" * 2_501 + bytes(1_500)
    assert shown.groups == [CellGroup(0, 5_001, None), CellGroup(2_501, 3_000, 8)]


@pytest.mark.parametrize("num_blocks", [4_095, 4_096, 4_097, 8_193])
def test_the_last_cell_may_stand_for_fewer(num_blocks: int) -> None:
    shown = BlockMap.of(b"\2" * num_blocks)
    assert set(shown.cells) == {0xF0}
    assert len(shown.cells) <= 4_096
    assert (len(shown.cells) - 1) * shown.blocks_per_cell < num_blocks <= len(shown.cells) * shown.blocks_per_cell
