"""Activation functions, plain and gated: a product with one of them after it is one kernel."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.ops.native.builder import Value
from quire.ops.native.structs import GATED, Epilogue, instruction
from quire.ops.rows import in_blocks
from quire.ops.table import Operation, op


def _gelu(wide: Tensor) -> Tensor:
    return (wide * math.sqrt(0.5)).erf_().add_(1.0).mul_(wide).mul_(0.5)


def _gelu_tanh(wide: Tensor) -> Tensor:
    inner = (wide * wide).mul_(wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(wide).mul_(0.5)


def _silu(wide: Tensor) -> Tensor:
    return wide / torch.neg(wide).exp_().add_(1.0)


def _gated(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def activate(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return function(gate.float()).mul_(up)

    return in_blocks(activate, x.shape[-1] // 2, x)


@op
def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up``: [M, 2 I], gate columns first -> [M, I]; in fp32, rounded once (arXiv:2002.05202)."""
    return _gated(_silu, x)


@op
def gelu_and_mul(x: Tensor) -> Tensor:
    """``gelu(gate) * up``: [M, 2 I], gate columns first -> [M, I]; in fp32, rounded once."""
    return _gated(_gelu, x)


@op
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """``gelu_tanh(gate) * up``: [M, 2 I], gate columns first -> [M, I]; in fp32, rounded once."""
    return _gated(_gelu_tanh, x)


@op
def gelu(x: Tensor) -> Tensor:
    """``x / 2 * (1 + erf(x / sqrt 2))``, in fp32 (arXiv:1606.08415)."""
    return in_blocks(lambda rows: _gelu(rows.float()), x.shape[-1], x)


@op
def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU, "gelu_new" and "gelu_pytorch_tanh": ``x / 2 * (1 + tanh(√(2/π) (x + 0.044715 x³)))``."""
    return in_blocks(lambda rows: _gelu_tanh(rows.float()), x.shape[-1], x)


@op
def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))``, in fp32 (arXiv:1702.03118)."""
    return in_blocks(lambda rows: _silu(rows.float()), x.shape[-1], x)


@op
def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``."""
    return torch.relu(x)


FUNCTIONS: dict[Epilogue, Operation[Any, Tensor]] = {
    Epilogue.SILU_MUL: silu_and_mul,
    Epilogue.GELU_MUL: gelu_and_mul,
    Epilogue.GELU_TANH_MUL: gelu_tanh_and_mul,
    Epilogue.GELU: gelu,
    Epilogue.GELU_TANH: gelu_tanh,
    Epilogue.RELU: relu,
    Epilogue.SILU: silu,
}


@instruction("activation")
class ActivationSpec(ctypes.Structure):
    _fields_ = [("size", ctypes.c_int64), ("function", ctypes.c_int32)]


def _build(x: Value, function: Epilogue) -> Value:
    width = x.width // 2 if function in GATED else x.width
    # The two halves of a gated product are finished block by block: they must fall into whole blocks of 16.
    product = x.builder.fusible_product(x) if function not in GATED or width % 16 == 0 else None
    if product is not None:
        product.spec.epilogue = function
        return x.builder.fuse(product, width)
    return x.builder.append(ActivationSpec(width, function), [x], width)


for _function, _operation in FUNCTIONS.items():
    _operation.native(lambda x, function=_function: _build(x, function))
