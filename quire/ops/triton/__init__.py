"""The operations' kernels in Triton, for NVIDIA GPUs. Whoever computes on one imports this and calls `install`.

Nothing else imports Triton, so that machines without it run what is around it: `quire.ops` must not. A row of what a
kernel returns is, bit for bit, a function of that row of its inputs alone: sums go in an order fixed by the tensors'
widths, never by the number of rows or of processors.
"""

from collections.abc import Callable
from typing import Any

from quire.ops.table import OPERATIONS
from quire.ops.triton.activation import ACTIVATIONS
from quire.ops.triton.embedding import embedding
from quire.ops.triton.experts import mix, route
from quire.ops.triton.linear import fast_linear, gated_linear, integer_linear, linear, quantized_linear
from quire.ops.triton.norm import add_rms_norm, layer_norm, rms_norm

_PRODUCTS = (gated_linear, integer_linear, linear, quantized_linear)
_OTHERS = (*_PRODUCTS, add_rms_norm, embedding, layer_norm, mix, rms_norm, route)
# By the operations' names, which are their own; called as their references are.
KERNELS: dict[str, Callable[..., Any]] = ACTIVATIONS | {kernel.__name__: kernel for kernel in _OTHERS}


def install(device_type: str = "cuda", *, fast_gemm: bool = False) -> None:
    """From now on operations of tensors on such a device go to the kernels; "cpu" is for the interpreter.

    fast_gemm: products with plain weights are the vendor's, and their sums depend on the number of rows.
    """
    fast = {"linear": fast_linear, "gated_linear": OPERATIONS["gated_linear"].reference} if fast_gemm else {}
    for name, kernel in (KERNELS | fast).items():
        OPERATIONS[name].kernel, OPERATIONS[name].kernel_device = kernel, device_type
