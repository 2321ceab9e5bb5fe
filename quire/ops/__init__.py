"""The operations that layers are made of: one name each, whatever kernel carries it out.

Layers and attention backends call these. Plain torch is all there is today; a native kernel takes over a name here,
chosen by what the CPU can do, with the signature and the result of its twin in `quire.ops.reference`. Nothing here
knows models, batches or caches beyond the tensors it is given.
"""

from quire.ops.reference import (
    add_layer_norm,
    add_rms_norm,
    embedding,
    gelu,
    gelu_tanh,
    layer_norm,
    linear,
    relu,
    rms_norm,
    rotary,
    silu_and_mul,
    write_kv,
)
from quire.ops.reference_attention import paged_attention

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "embedding",
    "gelu",
    "gelu_tanh",
    "layer_norm",
    "linear",
    "paged_attention",
    "relu",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "write_kv",
]
