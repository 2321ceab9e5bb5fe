"""The table of tiles, for devices that are not here: what exactness and the devices' limits ask of it."""

import pytest

from quire.ops.triton.tiles import LEAST_ROWS, Processors, choose

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB, as NVIDIA's guide has them
BITS = [(16, 16), (16, 8), (16, 4), (32, 32), (32, 4)]
COUNTS = {80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("x_bits", "weight_bits"), BITS)
@pytest.mark.parametrize("grouped", [False, True])
def test_tiles_fit(capability: int, x_bits: int, weight_bits: int, grouped: bool) -> None:
    where = Processors((capability // 10, capability % 10), COUNTS[capability])
    depths: set[int] = set()
    for num_rows in (1, 2, 16, 17, 33, 64, 65, 127, 500, 8192):
        for num_columns in (1, 100, 1024, 4096, 28672, 151936):
            tiles = choose(where, num_rows, num_columns, x_bits, weight_bits, grouped)
            assert tiles.block_m >= LEAST_ROWS.get(capability // 10, 16)
            assert all(size & (size - 1) == 0 and size >= 16 for size in tiles[:3])
            assert tiles.block_k % (64 if weight_bits == 4 else 16) == 0
            assert tiles.num_programs >= 1
            stage = tiles.block_m * x_bits + tiles.block_n * weight_bits
            if capability in (90, 100):  # whose instructions read a widened tile from there
                bits = tiles.num_stages * stage + (tiles.block_n * x_bits if weight_bits < x_bits else 0)
            else:
                bits = (tiles.num_stages - 1) * stage
            assert tiles.block_k * bits / 8 <= SHARED[capability] * 1024, (num_rows, num_columns, tiles)
            depths.add(tiles.block_k)
    assert depths <= {64, 128} if x_bits == 16 else {32, 64}


def test_few_rows_leave_no_processor_idle() -> None:
    hopper = Processors((9, 0), 132)
    for num_columns in (4096, 6144, 28672, 151936):
        for num_rows in (1, 16, 64):
            tiles = choose(hopper, num_rows, num_columns, 16, 16)
            assert tiles.num_programs >= 0.9 * 132
            assert tiles.block_m == 64
    assert choose(hopper, 8192, 4096, 16, 16)[:2] == (128, 256)
    assert choose(hopper, 8192, 4096, 16, 4, True)[:2] == (128, 128), "expanded weights would not fit in registers"
