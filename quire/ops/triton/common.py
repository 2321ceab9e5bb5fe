"""What the kernels share: the product of two tiles, roundings, and where their tensors may lie. Knows no operation.

Kernels multiply through `dot` and round through `narrow`: what the interpreter does its own way is dealt with here.
"""

from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def begin_kernel():
    """Where every kernel begins to read: its programs have come to their places while the kernel before still ran.

    It lets the next kernel's come likewise, and waits until all that was launched before has written what it writes.
    (Programmatic dependent launch: from Hopper on; `launch` asks for it.)
    """
    if INTERPRETED:
        pass
    elif cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch(lines):
    """Have the device bring cache lines to its L2, of what no kernel writes: something to do before `begin_kernel`."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in fp32: [M, K] x [K, N], both of one type.

    The interpreter has no bf16 to multiply, and a library whose order of summation depends on M and N: sums that are
    rounded to fp32 once show no trace of it.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float64), b.to(tl.float64), acc.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def exp2(x):
    """2 to the fp32 `x`, 0 below the smallest normal number: one instruction, where small numbers would take four."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 in another type, rounded to the nearest, ties to even; the interpreter would cut bits off for bf16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def widen(x, dtype: tl.constexpr):
    """Numbers in a type that holds them exactly; the interpreter has no way from integers to bf16."""
    if INTERPRETED:
        return narrow(x.to(tl.float32), dtype)
    else:
        return x.to(dtype)


def aligned(x: Tensor) -> Tensor:
    """`x`, contiguous and at a multiple of 16 bytes: programs are compiled anew for other places, and differently."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `kernel` in a grid of programs, if that has any. Products and sums are not fused unless it says so."""
    if 0 not in grid:
        early: dict[str, Any] = {"launch_pdl": True} if starts_early() else {}
        kernel[grid](*arguments, **{"enable_fp_fusion": False} | constants | early)


@cache
def starts_early() -> bool:
    """Whether kernels may be told to begin before the last one has ended."""
    return not INTERPRETED and bool(cuda_capability_geq(9, 0))
