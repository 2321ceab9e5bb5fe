"""What the tests of the native kernels share: sizes, tensors that end where memory does, and one product as a program.

A kernel that reads or writes beyond a buffer of `at_page_end` ends the process; the sizes here are those at which that
is likely: around every width of a vector, a tile and a panel.
"""

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire import ops
from quire.ops import activation
from quire.ops.native.builder import ProgramBuilder, Value, recorded
from quire.ops.native.matrix import PackedMatrix, weight_format, weight_order
from quire.ops.native.program import Program, StepData
from quire.ops.native.structs import Epilogue, Type
from quire.quantization.coded import quantize_int8

DTYPES = [torch.float32, torch.bfloat16]
# What a dense matrix is packed as.
DENSE = [Type.F32, Type.BF16, Type.I8, Type.I4, Type.W8A8, Type.W4A8, Type.BF16_TURNED, Type.W8A16]
IN_BYTES = [Type.W8A8, Type.W4A8, Type.W8A16]  # that meet rows rounded to integers
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # largest relative error of one rounding
MAX_ROWS = 300
ROWS = [*range(1, 71), 129, 255, 256, 257, MAX_ROWS]
# (features out, features in): odd ones, one tile and a little more or less, many tiles one way and the other.
SHAPES = [(1, 1), (7, 40), (40, 7), (16, 32), (33, 31), (100, 257), (199, 100), (257, 199), (1000, 40), (40, 1000)]
_PAGE = mmap.PAGESIZE


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal deviates."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def at_page_end(tensor: Tensor) -> Tensor:
    """A contiguous copy whose last byte is followed by a page that may neither be read nor written."""
    num_bytes = tensor.numel() * tensor.element_size()
    pages = max(1, -(-num_bytes // _PAGE))
    region = mmap.mmap(-1, (pages + 1) * _PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mprotect(ctypes.c_void_p(address + pages * _PAGE), ctypes.c_size_t(_PAGE), 0)
    assert not failed, ctypes.get_errno()
    if not tensor.numel():
        return torch.empty_like(tensor)
    offset = pages * _PAGE - num_bytes
    copy = torch.frombuffer(region, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
    return copy.copy_(tensor)


def packed(dense: Tensor, type: Type, paired: bool = False) -> PackedMatrix:
    """`dense` as a matrix for the kernels; it and its scales end where memory does."""
    rows, cols = dense.shape
    data = at_page_end(torch.zeros(PackedMatrix.data_shape(rows, cols, type), dtype=torch.uint8))
    scales = at_page_end(torch.zeros(rows)) if weight_format(type).has_scales else None
    matrix = PackedMatrix(data, scales, rows, cols, type, paired)
    matrix.pack(dense, 0)
    return matrix


def of_values(values: Tensor, type: Type, level: str) -> PackedMatrix:
    """Weights whose products are those of a plain matrix of `type` with these values, bit for bit.

    Where a level would have that one in pairs, and is to multiply it all the same, it multiplies floats.
    """
    return packed(values, Type.F32 if level == "avx512_bf16" and weight_order(level, type)[1] else Type.BF16)


def as_integers(x: Tensor, bits: int, columns: int, largest_sum: int | None = None) -> Tensor:
    """Rows in float64 as pairs have them: columns share a power of 2, in which the largest has so many bits.

    Fewer, where the sum of their magnitudes is too large.
    """
    groups = F.pad(x.double(), (0, -x.shape[1] % columns)).view(len(x), -1, columns)
    exponents = torch.frexp(groups.abs().amax(2, keepdim=True)).exponent
    units = torch.ldexp(torch.ones_like(groups[..., :1]), exponents - bits)
    sums = (groups / units).round().abs().sum(2, keepdim=True)
    while largest_sum is not None and (sums > largest_sum).any():
        units, sums = torch.where(sums > largest_sum, 2, 1) * units, torch.where(sums > largest_sum, 0.5, 1.0) * sums
    return ((groups / units).round() * units).flatten(1)[:, : x.shape[1]]


def in_integers(x: Tensor, type: Type) -> tuple[Tensor, Tensor]:
    """Integers and scales of rows, as a product with weights of this type, of IN_BYTES, takes them."""
    if type is not Type.W8A16:
        return quantize_int8(x.float())
    most = x.float().abs().amax(1, keepdim=True)
    most_code = torch.full_like(most, 127.0 * 256.0)
    inverse = torch.where(most > 0, most_code / most, torch.zeros_like(most))
    return (x.float() * inverse).round().clamp(-127 * 256, 127 * 256).to(torch.int32), most / most_code


def as_multiplied(x: Tensor, type: Type) -> Tensor:
    """Rows as a product with weights of this type takes them."""
    if type not in IN_BYTES:
        return x
    codes, scales = in_integers(x, type)
    return codes * scales


def run(program: Program, inputs: list[Tensor], width: int, dtype: torch.dtype, step: StepData | None = None) -> Tensor:
    """The program's output; inputs and output end where memory does."""
    out = at_page_end(torch.full((inputs[0].shape[0] if inputs else len(step.ids), width), torch.nan, dtype=dtype))
    program.run([*(at_page_end(x) for x in inputs), out], step)
    return out


def elementwise(function: Callable[[Value], Value], x: Tensor) -> Tensor:
    """What `function`, recorded, makes of the rows of x."""
    builder = ProgramBuilder(x.dtype)
    value = function(builder.input(x.shape[1]))
    return run(builder.finish(value), [x], value.width, x.dtype)


class Product:
    """A linear layer as a program: ``function(x @ matrix.T + bias) + residual``; called with x, or x and residual."""

    def __init__(
        self,
        matrix: PackedMatrix,
        dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        function: Epilogue = Epilogue.NONE,
        residual: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        def made() -> tuple[Program, int]:
            builder = ProgramBuilder(dtype)
            x = builder.input(matrix.cols)
            others = [builder.input(matrix.rows)] if residual else []
            value: Any = ops.linear(recorded(x), matrix, bias, out_dtype)
            if function is not Epilogue.NONE:
                value = activation.FUNCTIONS[function](value)
            for other in others:
                value = value + other
            return builder.finish(value), value.width

        self._made, self.dtype = made, out_dtype or dtype
        self.program, self.width = made()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Made anew where the number of threads is another by now."""
        same = self.program.target.num_threads == torch.get_num_threads()
        return run(self.program if same else self._made()[0], list(inputs), self.width, self.dtype)


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1.0)


FUNCTIONS: dict[Epilogue, Callable[[Tensor], Tensor]] = {
    Epilogue.NONE: lambda x: x,
    Epilogue.SWIGLU_OAI_MUL: lambda x: swiglu_oai(*x.chunk(2, -1)),
    Epilogue.SILU_MUL: lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    Epilogue.GELU: F.gelu,
    Epilogue.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Epilogue.RELU: F.relu,
    Epilogue.RELU2: lambda x: F.relu(x).square(),
    Epilogue.SILU: F.silu,
    Epilogue.GELU_MUL: lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    Epilogue.GELU_TANH_MUL: lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
}


def product_error(x: Tensor, dense: Tensor) -> Tensor:
    """A bound on the error of a sum of products in fp32 in any order, for each element of the result."""
    magnitude = x.double().abs() @ dense.double().abs().t()
    return magnitude * (4 + x.shape[1] ** 0.5) * 2.0**-23


def assert_near(found: Tensor, expected: Tensor, error: Tensor | float = 0.0, roundings: int = 1) -> None:
    """Equal to the fp64 tensor but for `error` and the rounding of the result to its type, once or more."""
    bound = error + (expected.abs() + error) * EPSILON[found.dtype] * 1.01 * roundings + 1e-30
    difference = (found.double() - expected).abs()
    worst = (difference / bound).max().item() if found.numel() else 0.0
    assert not found.isnan().any()
    assert worst <= 1, f"off by up to {difference.max().item():.3g}, {worst:.3g} times what rounding explains"


class Threads:
    """`with Threads(2):` programs that are made inside, and matrices packed there, use that many threads."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self.before)
