"""Activation functions, plain and gated: the kernel of `quire.ops.activation`. Each element by itself, in fp32."""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops import activation
from quire.ops.triton.common import begin_kernel, launch, narrow

OAI_LIMIT, OAI_SLOPE = tl.constexpr(activation.OAI_LIMIT), tl.constexpr(activation.OAI_SLOPE)
BLOCK = 1024  # columns of a program


@triton.jit
def activate(x, NAME: tl.constexpr):
    """The function of that name, of fp32."""
    if NAME == "silu":
        return x / (1.0 + tl.exp(-x))
    elif NAME == "gelu":
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":  # (1 + tanh u) / 2 is 1 / (1 + exp(-2 u))
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif NAME == "swiglu_oai":
        held = tl.where(x > OAI_LIMIT, OAI_LIMIT, x)
        return held / (1.0 + tl.exp(held * -OAI_SLOPE))
    else:
        x = tl.where(x < 0.0, 0.0, x)  # which keeps a NaN
        return x * x if NAME == "relu2" else x


@triton.jit
def opened(x, NAME: tl.constexpr):
    """What the gate of that name is multiplied by, of fp32."""
    if NAME == "swiglu_oai":
        x = tl.where(x > OAI_LIMIT, OAI_LIMIT, x)
        return tl.where(x < -OAI_LIMIT, -OAI_LIMIT, x) + 1.0
    else:
        return x


@triton.jit
def _activation(x, out, row_stride, size, NAME: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    begin_kernel()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    x += row * row_stride
    result = activate(tl.load(x + columns, mask, other=0.0).to(tl.float32), NAME)
    if GATED:
        result *= opened(tl.load(x + size + columns, mask, other=0.0).to(tl.float32), NAME)
    tl.store(out + row * size + columns, narrow(result, out.dtype.element_ty), mask)


def _run(x: Tensor, name: str, gated: bool) -> Tensor:
    rows = x.flatten(0, -2)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    grid = (rows.shape[0], -(-size // BLOCK))
    launch(_activation, grid, rows, out, rows.stride(0), size, NAME=name, GATED=gated, BLOCK=BLOCK)
    return out


# By the operations' names.
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    name + suffix: partial(_run, name=name, gated=bool(suffix))
    for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    for suffix in ("", "_and_mul")
    if not name.startswith("relu") or not suffix
} | {"swiglu_oai": partial(_run, name="swiglu_oai", gated=True)}
