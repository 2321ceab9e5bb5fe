"""Activation functions, plain and gated: a product with one of them after it is one kernel."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.ops.elementwise import in_blocks
from quire.ops.native.builder import Value
from quire.ops.native.structs import GATED, Epilogue
from quire.ops.table import Operation, op


def _gelu(wide: Tensor) -> Tensor:
    return (wide * math.sqrt(0.5)).erf_().add_(1.0).mul_(wide).mul_(0.5)


def _gelu_tanh(wide: Tensor) -> Tensor:
    inner = (wide * wide).mul_(wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(wide).mul_(0.5)


def _silu(wide: Tensor) -> Tensor:
    return wide / torch.neg(wide).exp_().add_(1.0)


def _swiglu_oai(wide: Tensor) -> Tensor:
    held = wide.clamp(max=OAI_LIMIT)
    return held / (held * -OAI_SLOPE).exp_().add_(1.0)


def _opened_oai(up: Tensor) -> Tensor:
    return up.float().clamp(-OAI_LIMIT, OAI_LIMIT).add_(1.0)


OAI_LIMIT, OAI_SLOPE = 7.0, 1.702  # of gpt-oss
Activation = Operation[[Tensor], Tensor]
Function = Callable[[Tensor], Tensor]
FUNCTIONS: dict[Epilogue, Activation] = {}


def _activation(name: str, kind: Epilogue, function: Function, opened: Function | None = None) -> Activation:
    """The operation of this name: `function` in fp32, rounded once; of a gated one, [M, 2 I] -> [M, I], gate first.

    opened: what the gate is multiplied by, where that is not the second half as it is.
    """

    def gated(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return function(gate.float()).mul_(up if opened is None else opened(up))

    def reference(x: Tensor) -> Tensor:
        if kind in GATED:
            return in_blocks(gated, x.shape[-1] // 2, x)
        return in_blocks(lambda rows: function(rows.float()), x.shape[-1], x)

    reference.__name__ = name
    FUNCTIONS[kind] = operation = op(reference)
    operation.native(partial(_build, function=kind))
    return operation


def _build(x: Value, function: Epilogue) -> Value:
    width = x.width // 2 if function in GATED else x.width
    # The two halves of a gated product are finished block by block: they must fall into whole blocks of 16.
    product = x.builder.fusible_product(x) if function not in GATED or width % 16 == 0 else None
    if product is not None:
        product.spec.epilogue = function
        return x.builder.fuse(product, width)
    return x.builder.append("activation", [x], width, size=width, function=function)


# ``x / (1 + exp(-x))`` (arXiv:1702.03118), and ``silu(gate) * up`` (arXiv:2002.05202).
silu = _activation("silu", Epilogue.SILU, _silu)
silu_and_mul = _activation("silu_and_mul", Epilogue.SILU_MUL, _silu)
# gpt-oss's ``gate / (1 + exp(-1.702 gate)) * (up + 1)``: before that a gate is at most 7, and `up` within -7 .. 7.
swiglu_oai = _activation("swiglu_oai", Epilogue.SWIGLU_OAI_MUL, _swiglu_oai, _opened_oai)
# ``x / 2 * (1 + erf(x / sqrt 2))`` (arXiv:1606.08415).
gelu = _activation("gelu", Epilogue.GELU, _gelu)
gelu_and_mul = _activation("gelu_and_mul", Epilogue.GELU_MUL, _gelu)
# The tanh form of GELU, "gelu_new" and "gelu_pytorch_tanh": ``x / 2 * (1 + tanh(√(2/π) (x + 0.044715 x³)))``.
gelu_tanh = _activation("gelu_tanh", Epilogue.GELU_TANH, _gelu_tanh)
gelu_tanh_and_mul = _activation("gelu_tanh_and_mul", Epilogue.GELU_TANH_MUL, _gelu_tanh)
relu = _activation("relu", Epilogue.RELU, torch.relu)
# Its square (arXiv:2109.08668).
relu2 = _activation("relu2", Epilogue.RELU2, lambda wide: torch.relu(wide).square_())
