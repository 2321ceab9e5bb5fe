"""The table of shapes of products: how many rows, columns and features a program multiplies at a time, by device.

`quire.ops.triton.linear` asks. What may depend on the number of rows here, and what may not, is its exactness:

- A sum of products is one chain, feature after feature, in the accumulator of one thread. Which rows and columns share
  a tile, which warps have them, how early they are loaded: none of that is in the chain.
- The matrix instruction is. It sums some features at once (16, of types of 16 bits), in an order that the hardware has,
  the same for every row of a tile and for tiles of every width. But small tiles are compiled to other instructions: on
  Hopper to those of a single warp below 64 rows, on Blackwell below 128. Hence LEAST_ROWS, however few there are.
- The features of a tile are whole instructions, taken in ascending order: 64 or 128 of them make the same chain. The
  interpreter rounds once a tile (`quire.ops.triton.common.dot`): for it their number never changes.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton

LEAST_ROWS = {9: 64, 10: 128}  # by the major number of the compute capability; else 16
INTERPRETER = (0, 0)  # the capability of none
# KiB of a processor's memory that programs can share, less what they need for their ends; elsewhere 92.
_SHARED_KIB = {INTERPRETER: 200, (8, 0): 156, (8, 7): 156, (9, 0): 216, (10, 0): 216, (10, 3): 216}
# Rows and columns, the largest first: the first of which there are enough for all processors is taken.
_SIZES = ((128, 256), (128, 128), (64, 128), (64, 64), (64, 32), (64, 16))


class Processors(NamedTuple):
    """A device, as far as products depend on it: its compute capability and its number of multiprocessors."""

    capability: tuple[int, int]
    number: int


class Tiles(NamedTuple):
    """The constants of one launch.

    `described`: whether its operands had better be fetched by the device's own copier (TMA), if that takes them.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_programs: int
    described: bool


@cache
def processors(device: torch.device) -> Processors:
    """Those of a device; the interpreter has few, so that programs take more than one tile."""
    if device.type != "cuda":
        return Processors(INTERPRETER, 3)
    properties = torch.cuda.get_device_properties(device)
    return Processors((properties.major, properties.minor), properties.multi_processor_count)


@cache
def choose(
    where: Processors, num_rows: int, num_columns: int, x_bits: int, weight_bits: int, grouped: bool = False
) -> Tiles:
    """The tiles of [num_rows, K] x [num_columns, K] of so many bits a feature; `grouped`: scaled as they are widened.

    At most 64 rows are bound by the time that the weights take to come: narrow tiles, so that every processor loads,
    with many bytes under way. More are bound by the products: tiles as large as registers hold.
    """
    few = num_rows <= 64
    block_m, block_n, num_tiles = _size(where, num_rows, num_columns, x_bits, grouped)
    block_k = 128 if few or weight_bits < 16 or where.capability == INTERPRETER else 64
    block_k = block_k // 2 if x_bits == 32 and where.capability > INTERPRETER else block_k
    stage = block_k * (block_m * x_bits + block_n * weight_bits) // 8
    # Two programs on a processor, where there are so many and their registers leave room for it.
    most = 128 * (128 if where.capability[0] == 9 else 64)
    share = 2 if num_tiles > where.number and block_m * block_n <= most else 1
    room = _SHARED_KIB.get(where.capability, 92) * 1024 // share
    if weight_bits < x_bits and where.capability[0] in LEAST_ROWS:  # whose instructions read the widened tile there
        room -= block_k * block_n * x_bits // 8
    num_stages = max(2, min(room // stage, 6 if few else 4 if x_bits < 32 else 3))
    num_programs = num_tiles if few else min(num_tiles, where.number * share)
    num_warps = 8 if block_m * block_n >= 128 * 128 else 4
    described = not few and x_bits == 16 and (where.capability[0] in LEAST_ROWS or where.capability == INTERPRETER)
    return Tiles(block_m, block_n, block_k, num_warps, num_stages, num_programs, described)


def _size(where: Processors, num_rows: int, num_columns: int, x_bits: int, grouped: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile, and how many tiles there are."""
    least = LEAST_ROWS.get(where.capability[0], 16)
    rows = max(least, min(triton.next_power_of_2(num_rows), 128))
    # Only Hopper's instructions have the sums of the largest in registers without spilling them, or what becomes of a
    # tile of codes; fp32 has none at all.
    columns = 64 if x_bits == 32 else 32 if num_rows <= 16 else 64 if num_rows <= 64 else 256
    columns = (
        128
        if where.capability == INTERPRETER
        else min(columns, 256 if where.capability[0] == 9 and not grouped else 128)
    )
    made: tuple[int, int, int] = (0, 0, 0)
    for block_m, block_n in _SIZES:
        block_m = max(least, min(block_m, 64 if x_bits == 32 else block_m) if rows >= 64 else rows)
        if block_m > rows or block_n > columns:
            continue
        made = block_m, block_n, triton.cdiv(num_rows, block_m) * triton.cdiv(num_columns, block_n)
        if made[2] >= where.number * 9 // 10:
            break
    return made
