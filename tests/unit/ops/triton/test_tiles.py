"""The table of tiles, for devices that are not here: what exactness and the devices' limits ask of it."""

import pytest

from quire.ops.triton.tiles import LEFT_ROWS, Processors, choose

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB, as NVIDIA's guide has them
BITS = [(16, 16), (16, 8), (16, 4), (32, 32), (32, 4)]
COUNTS = {80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("x_bits", "weight_bits"), BITS)
def test_tiles_fit(capability: int, x_bits: int, weight_bits: int) -> None:
    where = Processors((capability // 10, capability % 10), COUNTS[capability])
    depths: set[int] = set()
    for num_rows in (1, 2, 16, 17, 33, 64, 65, 127, 128, 129, 500, 8192):
        for num_columns in (1, 100, 1024, 4096, 28672, 151936):
            tiles = choose(where, num_rows, num_columns, x_bits, weight_bits)
            left = tiles.block_n if tiles.turned else tiles.block_m
            assert left >= LEFT_ROWS.get(capability // 10, 16) or x_bits == 32
            assert not tiles.turned or capability // 10 == 9, "seen to be the same there alone"
            assert all(size & (size - 1) == 0 and size >= 16 for size in tiles[:3])
            assert tiles.block_k % (64 if weight_bits == 4 else 16) == 0
            assert tiles.num_programs >= 1
            stage = tiles.block_m * x_bits + tiles.block_n * weight_bits
            if capability in (90, 100):
                widened = tiles.block_n * x_bits if weight_bits < x_bits and not tiles.turned else 0
                bits = tiles.num_stages * stage + widened
            else:
                bits = (tiles.num_stages - 1) * stage
            assert tiles.block_k * bits / 8 <= SHARED[capability] * 1024, (num_rows, num_columns, tiles)
            depths.add(tiles.block_k)
    assert depths <= {64, 128, 256} if x_bits == 16 else {32, 64}


def test_few_rows_leave_few_processors_idle() -> None:
    hopper = Processors((9, 0), 132)
    for num_columns in (6144, 28672, 151936):
        for num_rows in (1, 16, 64):
            tiles = choose(hopper, num_rows, num_columns, 16, 16)
            assert tiles.num_programs >= 0.7 * 132
            assert tiles.block_m == max(16, num_rows), "rows that are not there are not multiplied"
            if tiles.num_programs > 132:
                shared = tiles.num_stages * tiles.block_k * (tiles.block_m + tiles.block_n) * 2
                assert 2 * shared <= SHARED[90] * 1024, "one loads while the other multiplies"
    assert choose(hopper, 8192, 4096, 16, 16)[:2] == (128, 256)
    assert choose(hopper, 1024, 6144, 16, 16)[:2] == (128, 128), "less of the last round is idle"
    assert choose(hopper, 8192, 4096, 16, 4)[:2] == (256, 128), (
        "each weight is widened for as many rows as there is room"
    )
