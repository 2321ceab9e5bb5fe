"""The attention backend of NVIDIA GPUs: a layer is one launch of `prepare` and one or two of `paged_attention`.

The kernels and the cache's layout are those of `quire.ops.triton`; the registry imports this when a device asks for it.
Nothing here reads a tensor on the host, but for adapters' virtual tokens: a step can be captured as a CUDA graph.
"""

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch, AttentionSpec, SlotMoves
from quire.attention.step import Step
from quire.ops.triton.attention import paged_attention
from quire.ops.triton.pages import Kind, move_tokens, open_pages, pages_shape
from quire.ops.triton.rope import prepare, write_virtual


class TritonBackend(AttentionBackend):
    """Keys and values of the model's type, or in eight bits with scales: whole numbers, or e4m3."""

    def __init__(self, kind: Kind = "model") -> None:
        self.kind: Kind = kind

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return pages_shape(num_blocks, block_size, (num_kv_heads, head_dim), self.kind)

    def kv_cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.kind == "model" else torch.int8

    def attend(self, qkv: Tensor, spec: AttentionSpec, step: Step) -> Tensor:
        batch: AttentionBatch = step.attention[spec.group]
        pages = open_pages(step.caches[spec.layer], batch.block_size, self.kind)
        query = prepare(qkv, pages, batch.slot_mapping, step.positions, spec)
        if spec.prefix is not None and step.adapters is not None:
            write_virtual(spec.prefix, step.adapters.rows, pages, batch.slot_mapping, step.positions)
        return paged_attention(query, pages, batch, spec)

    def move_slots(self, kv_cache: Tensor, moves: SlotMoves) -> None:
        move_tokens(open_pages(kv_cache, moves.block_size, self.kind), moves.sources, moves.destinations)
