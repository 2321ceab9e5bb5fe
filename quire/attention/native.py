"""The attention backend of the native kernels.

A recorded program prepares and attends by itself; it takes the cache's shape and the step's description from here. The
calls of the contract do the same one at a time, for the tests against the reference.
"""

from functools import cache

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.ops.native.library import current_level
from quire.ops.native.program import Caches, HeadShape, Preparation, Program, ProgramBuilder, StepData
from quire.ops.native.structs import TYPE_OF

DIM_MULTIPLE = 32  # a head's features are padded to this in the cache
_SCALE_BYTES = 4  # of a token and head in an int8 cache


class NativeBackend(AttentionBackend[AttentionBatch]):
    """Keys and values in the layout that this CPU multiplies best; float32, bfloat16, or int8 with scales.

    Args:
        int8: keep keys and values in eight bits.
    """

    def __init__(self, int8: bool = False) -> None:
        self.int8 = int8

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[blocks, 2, Hkv, elements of a head's tokens], keys then values; csrc/kernels.h has the order within."""
        padded = -(-head_dim // DIM_MULTIPLE) * DIM_MULTIPLE
        return (num_blocks, 2, num_kv_heads, block_size * (padded + (_SCALE_BYTES if self.int8 else 0)))

    def kv_cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int8 if self.int8 else dtype

    def build(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionBatch) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        heads = HeadShape(num_kv_heads, num_kv_heads, head_dim)
        qkv = torch.cat((key, key, value), dim=1).reshape(num_tokens, -1)  # the first third stands in for the queries
        out = torch.empty(num_tokens, num_kv_heads * head_dim, dtype=key.dtype)
        program = _write_and_attend(current_level(), heads, 1.0, None, key.dtype, True)
        program.run([qkv, out], step_data(metadata), Caches([kv_cache], TYPE_OF[kv_cache.dtype]))

    def forward(
        self, query: Tensor, kv_cache: Tensor, metadata: AttentionBatch, scale: float, sliding_window: int | None
    ) -> Tensor:
        num_tokens, num_heads, head_dim = query.shape
        heads = HeadShape(num_heads, kv_cache.shape[2], head_dim)
        out = torch.empty(num_tokens, num_heads * head_dim, dtype=query.dtype)
        program = _write_and_attend(current_level(), heads, scale, sliding_window, query.dtype, False)
        rows = query.reshape(num_tokens, -1).contiguous()
        program.run([rows, out], step_data(metadata), Caches([kv_cache], TYPE_OF[kv_cache.dtype]))
        return out.view(query.shape)

    def fill_blocks(self, kv_cache: Tensor, blocks: Tensor, value: float) -> None:
        if kv_cache.dtype is torch.int8:  # all bits set: the scales are NaN then
            kv_cache.index_fill_(0, blocks, -1 if value != value else int(value))
        else:
            super().fill_blocks(kv_cache, blocks, value)


def step_data(batch: AttentionBatch, ids: Tensor | None = None, positions: Tensor | None = None) -> StepData:
    """The step for a program's run; ids and positions where it has embeddings or rotations."""
    unused = batch.slot_mapping
    return StepData(
        ids=unused if ids is None else ids,
        positions=unused if positions is None else positions,
        slots=batch.slot_mapping,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_tables=batch.block_tables,
        block_size=batch.block_size,
    )


@cache
def _write_and_attend(
    level: str, heads: HeadShape, scale: float, window: int | None, dtype: torch.dtype, write: bool
) -> Program:
    """A program of one layer: [T, (Hq + 2 Hkv) D] written and attended with, or [T, Hq D] only attended with.

    `level` is the one in use, which the program is recorded for.
    """
    builder = ProgramBuilder(dtype)
    num_heads = heads.num_heads + (2 * heads.num_kv_heads if write else 0)
    rows = builder.input(num_heads * heads.head_dim)
    if write:
        builder.prepare(rows, heads, Preparation(), layer=0)
    return builder.finish(builder.attend(rows, heads, layer=0, scale=scale, window=window))
