"""The structs of csrc, for ctypes, as the compiled library describes them: they are declared there and nowhere else.

Which operations there are, their numbers, and what each is told beside its operands the library says, too (csrc/ops.h).
Used by the builder and by all who call kernels.
"""

import ctypes
from ctypes import c_char_p, c_int64
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from quire.ops.native.library import KINDS, loaded_library, operation_names

# Element types; of a weight matrix also its format. From `Q4_0` on blocks: GGUF files', by their names, then our own.
Type = IntEnum(
    "Type",
    "F32 BF16 I8 I4 W8A8 W4A8 BF16_TURNED BF16_INTS W8A16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K "
    "IQ4_NL IQ4_XS U4_32 U4_128 U8_32 U8_128 F8_128 C4_32",
    start=0,
)
# What follows a product before it is stored.
Epilogue = IntEnum(
    "Epilogue", "NONE SILU_MUL GELU GELU_TANH RELU GELU_MUL GELU_TANH_MUL SILU SWIGLU_OAI_MUL RELU2", start=0
)
# function(first half) * second half, of which one makes more first
GATED = frozenset({Epilogue.SILU_MUL, Epilogue.GELU_MUL, Epilogue.GELU_TANH_MUL, Epilogue.SWIGLU_OAI_MUL})


TYPE_OF = {torch.float32: Type.F32, torch.bfloat16: Type.BF16, torch.int8: Type.I8}
DTYPE_OF = {type: dtype for dtype, type in TYPE_OF.items()}


class _Field(ctypes.Structure):
    _fields_ = [("of", c_char_p), ("name", c_char_p), ("kind", c_char_p), ("offset", c_int64), ("size", c_int64)]


@cache
def compiled_fields() -> dict[str, dict[str, _Field]]:
    """Struct -> its fields in order, as the library was compiled; the field "" is the whole of it."""
    count = c_int64()
    first = ctypes.cast(loaded_library().quire_fields(ctypes.byref(count)), ctypes.POINTER(_Field))
    found: dict[str, dict[str, _Field]] = {}
    for field in first[: count.value]:
        found.setdefault(field.of.decode(), {})[field.name.decode()] = field
    return found


@cache
def c_struct(name: str) -> type[ctypes.Structure]:
    """The struct of this name in csrc, or what the operation of this name is told beside its operands.

    Its fields are given by their names; one that it lacks is an AttributeError.
    """
    fields = dict(compiled_fields()[name])
    whole = fields.pop("")
    made = type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": [(f, _type(fields[f])) for f in fields]})
    assert ctypes.sizeof(made) == whole.size, f"{name} is laid out otherwise than any C struct of its fields"
    for field, compiled in fields.items():
        assert getattr(made, field).offset == compiled.offset, f"{name}.{field} lies where C would not have it"
    return made


def _type(field: _Field) -> Any:
    kind = field.kind.decode()
    one = KINDS[kind] if kind in KINDS else c_struct(kind)
    count = field.size // ctypes.sizeof(one)
    return one if count == 1 else one * count


def instruction(op: str, spec: ctypes.Structure, inputs: list[int], output: int) -> ctypes.Structure:
    """The operation `op` told `spec`, from and to these buffers."""
    made = c_struct("Instruction")(op=operation_names().index(op), output=output)
    made.inputs[:] = [*inputs, *[-1] * (len(made.inputs) - len(inputs))]
    ctypes.memmove(made.spec, ctypes.addressof(spec), ctypes.sizeof(spec))
    return made
