"""The attention backend of the native kernels.

While a model is recorded, `attend` adds a layer's two instructions to the program: prepare (norms, rotation, cache
write) and attend.
"""

from ctypes import addressof
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionSpec, SlotMoves
from quire.attention.step import Step
from quire.errors import ModelLoadError
from quire.ops.attention import attend
from quire.ops.native.builder import Value, recorded
from quire.ops.native.library import Target, choose_level, loaded_library
from quire.ops.native.structs import TYPE_OF, c_struct
from quire.ops.rope import prepare

DIM_MULTIPLE = 32  # a head's features are padded to this in the cache
_SCALE_BYTES = 4  # of a token and head in an int8 cache


class NativeBackend(AttentionBackend):
    """Keys and values in the layout that this CPU multiplies best; float32, bfloat16, or int8 with scales.

    Args:
        int8: keep keys and values in eight bits.
        level: of kernels; None for the default one.
    """

    def __init__(self, int8: bool = False, level: str | None = None) -> None:
        self.int8, self._level = int8, level

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[blocks, 2, Hkv, elements of a head's tokens], keys then values; csrc/kernels.h has the order within."""
        padded = -(-head_dim // DIM_MULTIPLE) * DIM_MULTIPLE
        return (num_blocks, 2, num_kv_heads, block_size * (padded + (_SCALE_BYTES if self.int8 else 0)))

    def kv_cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int8 if self.int8 else dtype

    def attend(self, qkv: Tensor | Value, spec: AttentionSpec, step: Step) -> Tensor:
        """Record it.

        Raises:
            ModelLoadError: the kernels have no such attention.
        """
        assert isinstance(qkv, Value), "the kernels' attention is part of a recorded program"
        if not spec.causal:
            what = "the compiled kernels have no attention to what comes later"
            raise ModelLoadError(f"{what}; kernels='torch' serves this model.")
        return recorded(attend(prepare(qkv, spec), spec))

    def attend_apart(self, query: Any, kv: Any, spec: AttentionSpec, step: Step) -> Tensor:
        """Record it: two instructions prepare them, as layers of keys and values alone, and of queries alone."""
        prepare(kv, replace(spec, num_heads=0))
        return recorded(attend(prepare(query, replace(spec, num_kv_heads=0, prefix=None)), spec))

    def move_slots(self, kv_cache: Tensor, moves: SlotMoves) -> None:
        _, _, num_kv_heads, size = kv_cache.shape
        arguments = c_struct("MoveArgs")(
            cache=kv_cache.data_ptr(),
            block_size=moves.block_size,
            num_kv_heads=num_kv_heads,
            head_dim=size // moves.block_size - (_SCALE_BYTES if self.int8 else 0),
            sources=moves.sources.data_ptr(),
            destinations=moves.destinations.data_ptr(),
            count=moves.sources.shape[0],
            type=TYPE_OF[kv_cache.dtype],
            activations=TYPE_OF[moves.dtype],
        )
        loaded_library().quire_move_slots(Target(self._level or choose_level()).kernels, addressof(arguments))
