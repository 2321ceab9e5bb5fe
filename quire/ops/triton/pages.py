"""How keys and values lie in a cache on the device: the layout, for the kernels that write and read it.

A block holds keys, then values; of each, a head's tokens lie one after another. In eight bits there is an fp32 scale
for each token and head, behind these tokens' features and within the block: who copies blocks copies them, too.

    block b  [ keys: head 0 | head 1 | ..  | values: head 0 | .. ]
    head h   [ token 0: D elements | token 1 | ..  | (eight bits) scale of token 0 | of token 1 | .. ]

The attention backend and the kernels beside this file use it; it knows no sequences. It imports torch alone.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["model", "int8", "fp8"]  # what elements are: of the model's type, or of eight bits with scales
SCALE_BYTES = 4


class Pages(NamedTuple):
    """One layer's cache as kernels are given it.

    Attributes:
        elements: [blocks, 2, Hkv, elements of a head's tokens], of the type that is read and written.
        scales: the same memory as fp32; `elements` itself where there are no scales.
        block_size: tokens per block.
        kind: of element.
    """

    elements: Tensor
    scales: Tensor
    block_size: int
    kind: Kind

    @property
    def constants(self) -> dict[str, int]:
        """What kernels are compiled for."""
        return {"BLOCK_SIZE": self.block_size, "MOST": {"model": 0, "int8": 127, "fp8": 448}[self.kind]}


def pages_shape(num_blocks: int, block_size: int, heads: tuple[int, int], kind: Kind) -> tuple[int, ...]:
    """Of a cache for (KV heads, their size), in elements; eight bits are stored as int8, whatever they mean."""
    num_kv_heads, head_dim = heads
    return (num_blocks, 2, num_kv_heads, block_size * (head_dim + (0 if kind == "model" else SCALE_BYTES)))


def open_pages(kv_cache: Tensor, block_size: int, kind: Kind) -> Pages:
    """A cache of `pages_shape`, as kernels are given it."""
    if kind == "model":
        return Pages(kv_cache, kv_cache, block_size, kind)
    elements = kv_cache.view(torch.float8_e4m3fn) if kind == "fp8" else kv_cache
    return Pages(elements, kv_cache.view(torch.float32), block_size, kind)


def move_tokens(pages: Pages, sources: Tensor, destinations: Tensor) -> None:
    """Move keys and values from slots to slots, integers [N] each; every source is read before any write."""
    size = pages.block_size
    there, here = ((slots.long() // size, slots.long() % size) for slots in (sources, destinations))
    used = pages.elements.shape[3] // size * size  # elements of a head's tokens, or with scales that many bytes
    bytes_ = pages.elements if pages.kind == "model" else pages.elements.view(torch.int8)
    split = used if pages.kind == "model" else used - size * SCALE_BYTES
    for part in (bytes_[..., :split], bytes_[..., split:]):
        if part.shape[3]:
            tokens = part.unflatten(3, (size, -1))
            tokens[here[0], :, :, here[1]] = tokens[there[0], :, :, there[1]]
