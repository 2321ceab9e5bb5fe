"""The table of shapes of products: how many rows, columns and features a program multiplies at a time, by device.

`quire.ops.triton.linear` asks. What may depend on the number of rows here, and what may not, is its exactness:

- A sum of products is one chain, feature after feature, in the accumulator of one thread. Which rows and columns share
  a tile, which warps have them, how early they are loaded: none of that is in the chain.
- The matrix instruction is. It sums some features at once (16, of types of 16 bits), in an order that the hardware has,
  the same for every row of a tile, for tiles of every width, and on Hopper for either factor on its left (measured:
  tests/gpu). But small tiles are compiled to other instructions: on Hopper to those of a single warp where the left
  factor has less than 64 rows, on Blackwell less than 128. Hence LEFT_ROWS, however few there are.
- The features of a tile are whole instructions, taken in ascending order: 64 or 256 of them make the same chain. The
  interpreter rounds once a tile (`quire.ops.triton.common.dot`): for it their number never changes.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEFT_ROWS = {9: 64, 10: 128}  # by the major number of the compute capability; else 16
FEW_ROWS = 64  # up to so many a product is bound by its weights
INTERPRETER = (0, 0)  # the capability of none
# KiB of a processor's memory that programs can share, less what they need for their ends; elsewhere 92.
_SHARED_KIB = {INTERPRETER: 200, (8, 0): 156, (8, 7): 156, (9, 0): 216, (10, 0): 216, (10, 3): 216}
# Rows and columns of tiles of many rows, and what one takes beside the first.
_LARGEST = {(128, 256): 1.0, (128, 128): 0.57, (64, 128): 0.42}  # on Hopper, as an H100 shows
_TURNED = {(256, 128): 1.0, (128, 128): 0.75, (128, 64): 0.5}  # likewise
_LARGE = {(128, 128): 1.0, (64, 128): 0.58, (64, 64): 0.34}  # elsewhere, where there is less room: not measured
_FP32 = {(64, 64): 1.0, (64, 32): 0.6, (64, 16): 0.35}


class Processors(NamedTuple):
    """A device, as far as products depend on it: its compute capability and its number of multiprocessors."""

    capability: tuple[int, int]
    number: int


class Tiles(NamedTuple):
    """The constants of one launch.

    `turned`: whether the weights are the left factor, so that tiles of few rows waste nothing. `described`: whether its
    operands had better be fetched by the device's own copier (TMA), if that takes them.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_programs: int
    turned: bool
    described: bool

    def constants(self, x: Tensor) -> dict[str, Any]:
        """What the kernels are told of them, as arguments of `launch`; `x`: the rows to multiply."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        told = {"EVEN": x.shape[1] % self.block_k == 0, "TURNED": self.turned}
        how = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        # In float32 every product of a chain is fused with its sum.
        return {**blocks, **told, **how, "enable_fp_fusion": x.dtype == torch.float32}


@cache
def processors(device: torch.device) -> Processors:
    """Those of a device; the interpreter has few, so that programs take more than one tile."""
    if device.type != "cuda":
        return Processors(INTERPRETER, 3)
    properties = torch.cuda.get_device_properties(device)
    return Processors((properties.major, properties.minor), properties.multi_processor_count)


@cache
def choose(where: Processors, num_rows: int, num_columns: int, x_bits: int, weight_bits: int) -> Tiles:
    """The tiles of [num_rows, K] x [num_columns, K] of so many bits a feature.

    Few rows are bound by the time that the weights take to come: narrow tiles, so that every processor loads, with many
    bytes under way. More are bound by the products: tiles as large as registers hold.
    """
    interpreted, hopper = where.capability == INTERPRETER, where.capability[0] == 9
    few, coded = num_rows <= FEW_ROWS, weight_bits < x_bits
    turned = (hopper or interpreted) and x_bits < 32 and (few or coded)
    kind = _Kind(where, few, coded, turned, x_bits, weight_bits, interpreted, hopper)
    block_m, block_n = _rows_and_columns(kind, num_rows, num_columns)
    block_k = _features(kind, square=block_m == block_n)
    num_tiles = -(-num_rows // block_m) * -(-num_columns // block_n)
    # Two programs on a processor, where there are so many and their registers leave room for it: one loads its first
    # tiles while the other still multiplies.
    light = turned and few and not coded if hopper else block_m * block_n <= 128 * 64
    share = 2 if num_tiles > where.number and light else 1
    num_stages = _stages(kind, share, block_m, block_n, block_k)
    num_programs = num_tiles if few else min(num_tiles, where.number * share)
    num_warps = 8 if block_m * block_n >= 128 * 128 else 4
    described = not few and not turned and x_bits == 16 and (where.capability[0] in LEFT_ROWS or interpreted)
    return Tiles(block_m, block_n, block_k, num_warps, num_stages, num_programs, turned, described)


class _Kind(NamedTuple):
    """What a product is like: of few rows, by codes, with the weights as its left factor; and where."""

    where: Processors
    few: bool
    coded: bool
    turned: bool
    x_bits: int
    weight_bits: int
    interpreted: bool
    hopper: bool


def _rows_and_columns(kind: _Kind, num_rows: int, num_columns: int) -> tuple[int, int]:
    least = LEFT_ROWS.get(kind.where.capability[0], 16)
    if kind.few:
        rows = max(16 if kind.turned else least, 1 << (num_rows - 1).bit_length())
        return rows, 64 if kind.turned else _narrow(kind.where, rows, num_columns, kind.x_bits)
    if kind.interpreted:
        return 128, 128
    sizes = _FP32 if kind.x_bits == 32 else _TURNED if kind.turned else _LARGEST if kind.hopper else _LARGE
    if kind.x_bits < 32 and not kind.turned:
        sizes = {size: cost for size, cost in sizes.items() if size[0] >= least}
    return _fastest(sizes, kind.where, num_rows, num_columns)


def _features(kind: _Kind, square: bool) -> int:
    """How many a tile has; `square`: as many rows as columns."""
    if kind.x_bits == 32 and not kind.interpreted:
        return 64 if kind.few or kind.coded else 32
    if kind.few or kind.interpreted:
        return 256 if kind.hopper and kind.coded else 128  # as many bytes of codes as of others
    return 128 if kind.x_bits == 8 or (kind.coded and (square or not kind.turned)) else 64


def _stages(kind: _Kind, share: int, block_m: int, block_n: int, block_k: int) -> int:
    """How many tiles of both factors are under way: as many as the memory that `share` programs have has room for."""
    room = _SHARED_KIB.get(kind.where.capability, 92) * 1024 // share
    if kind.coded and kind.where.capability[0] in LEFT_ROWS and not kind.turned:
        room -= block_k * block_n * kind.x_bits // 8  # whose instructions read the widened tile there
    if kind.turned and kind.coded:
        most = 4 if kind.weight_bits == 8 and block_m < 256 else 3
    else:
        most = 3 if kind.x_bits == 32 and not kind.few else 6
    stage = block_k * (block_m * kind.x_bits + block_n * kind.weight_bits) // 8
    return max(2, min(room // stage, most))


def _narrow(where: Processors, rows: int, num_columns: int, x_bits: int) -> int:
    """Columns of a tile of few rows: the most of which nearly all processors get some."""
    columns = 32 if rows <= 16 and x_bits < 32 else 64
    while columns > 16 and -(-num_columns // columns) < where.number * 9 // 10:
        columns //= 2
    return columns


def _fastest(sizes: dict[tuple[int, int], float], where: Processors, rows: int, columns: int) -> tuple[int, int]:
    """The tile that all processors together have done with first."""

    def cost(size: tuple[int, int]) -> float:
        num_tiles = -(-rows // size[0]) * -(-columns // size[1])
        return sizes[size] * -(-num_tiles // where.number)

    return min(sizes, key=cost)
