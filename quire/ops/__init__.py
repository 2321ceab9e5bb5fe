"""The operations that layers are made of: one name each, whatever carries it out.

Given tensors, plain torch computes (`quire.ops.reference`, the meaning of each operation). Given the builder's values
in place of tensors, the operation appends itself to a program of native kernels (`quire.ops.native.program`). Layers
call these and don't see the difference. Nothing here knows models, batches or caches beyond what it is given.
"""

from collections.abc import Callable

from torch import Tensor

from quire.ops import reference
from quire.ops.native.program import StepIndex, Value, recorded
from quire.ops.native.structs import Epilogue
from quire.ops.reference import linear, rotary, write_kv
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `quire.ops.reference.rms_norm`."""
    if isinstance(x, Value):
        return recorded(x.builder.norm(x, weight, None, eps, subtract_mean=False))
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `quire.ops.reference.add_rms_norm`."""
    if isinstance(x, Value):
        total = x + residual
        return rms_norm(total, weight, eps), total
    return reference.add_rms_norm(x, residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See `quire.ops.reference.layer_norm`."""
    if isinstance(x, Value):
        return recorded(x.builder.norm(x, weight, bias, eps, subtract_mean=True))
    return reference.layer_norm(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `quire.ops.reference.add_layer_norm`."""
    if isinstance(x, Value):
        total = x + residual
        return layer_norm(total, weight, bias, eps), total
    return reference.add_layer_norm(x, residual, weight, bias, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `quire.ops.reference.silu_and_mul`."""
    return _activate(x, reference.silu_and_mul, Epilogue.SILU_MUL)


def gelu(x: Tensor) -> Tensor:
    """See `quire.ops.reference.gelu`."""
    return _activate(x, reference.gelu, Epilogue.GELU)


def gelu_tanh(x: Tensor) -> Tensor:
    """See `quire.ops.reference.gelu_tanh`."""
    return _activate(x, reference.gelu_tanh, Epilogue.GELU_TANH)


def relu(x: Tensor) -> Tensor:
    """See `quire.ops.reference.relu`."""
    return _activate(x, reference.relu, Epilogue.RELU)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """See `quire.ops.reference.embedding`."""
    assert not isinstance(ids, StepIndex), "a program looks up packed tables only: see the weight format's lookup"
    return reference.embedding(ids, table)


def _activate(x: Tensor, function: Callable[[Tensor], Tensor], epilogue: Epilogue) -> Tensor:
    return recorded(x.builder.activation(x, epilogue)) if isinstance(x, Value) else function(x)
