"""The structs of csrc, for ctypes: field by field the same, checked when first used.

What an instruction is told beside its operands is declared by `instruction` in the file of its operation; which
operations there are, and their numbers, the library says (csrc/ops.h). Used by the builder and by all who call kernels.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TypeVar

import torch

from quire.ops.native.library import loaded_library, operation_names


class Type(IntEnum):
    """Element types; of a weight matrix also its format."""

    F32 = 0
    BF16 = 1
    I8 = 2
    I4 = 3


class Epilogue(IntEnum):
    """What follows a product before it is stored."""

    NONE = 0
    SILU_MUL = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4
    GELU_MUL = 5
    GELU_TANH_MUL = 6
    SILU = 7


GATED = frozenset({Epilogue.SILU_MUL, Epilogue.GELU_MUL, Epilogue.GELU_TANH_MUL})  # function(first half) * second half


TYPE_OF = {torch.float32: Type.F32, torch.bfloat16: Type.BF16, torch.int8: Type.I8}
DTYPE_OF = {type: dtype for dtype, type in TYPE_OF.items()}


class MatrixStruct(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("scales", c_void_p), ("rows", c_int64), ("cols", c_int64), ("type", c_int32)]


class HeadSpec(ctypes.Structure):
    _fields_ = [
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("layer", c_int32),
        ("group", c_int32),
    ]


@dataclass(frozen=True)
class Instruction:
    """An operation of programs, as csrc's list of them has it.

    Attributes:
        wants_step: it looks at the step's tokens, not just at rows of activations.
    """

    name: str
    wants_step: bool


INSTRUCTIONS: dict[type[ctypes.Structure], Instruction] = {}
S = TypeVar("S", bound=type[ctypes.Structure])


def instruction(name: str, *, wants_step: bool = False) -> Callable[[S], S]:
    """Declare the struct that the operation `name` of csrc is told beside its operands; each lives in its op's file."""

    def declare(spec: S) -> S:
        INSTRUCTIONS[spec] = Instruction(name, wants_step)
        return spec

    return declare


# Those that the builder itself records or fuses are declared here.
@instruction("linear")
class LinearSpec(ctypes.Structure):
    _fields_ = [("weight", MatrixStruct), ("bias", c_void_p), ("epilogue", c_int32)]


@instruction("add")
class AddSpec(ctypes.Structure):
    _fields_ = [("size", c_int64)]


@instruction("scale")
class ScaleSpec(ctypes.Structure):
    _fields_ = [("size", c_int64), ("factor", c_float)]


class InstructionStruct(ctypes.Structure):
    _fields_ = [("op", c_int32), ("inputs", c_int32 * 2), ("output", c_int32), ("spec", c_int64 * 12)]

    @classmethod
    def of(cls, spec: ctypes.Structure, inputs: list[int], output: int) -> "InstructionStruct":
        """The operation that `spec` belongs to, from and to these buffers."""
        struct = cls(op=operation_names().index(INSTRUCTIONS[type(spec)].name), output=output)
        struct.inputs[:] = [*inputs, *[-1] * (2 - len(inputs))]
        ctypes.memmove(struct.spec, ctypes.addressof(spec), ctypes.sizeof(spec))
        return struct


class BufferStruct(ctypes.Structure):
    _fields_ = [("width", c_int64), ("type", c_int32), ("bound", c_int32)]


class ProgramStruct(ctypes.Structure):
    _fields_ = [
        ("instructions", c_void_p),
        ("num_instructions", c_int64),
        ("buffers", c_void_p),
        ("num_buffers", c_int64),
        ("kernels", c_void_p),
        ("num_threads", c_int32),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("max_blocks", c_int64),
        ("block_size", c_int64),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("tail_starts", c_void_p),
        ("tail_slots", c_void_p),
        ("max_tail", c_int64),
    ]


class MoveStruct(ctypes.Structure):
    _fields_ = [
        ("cache", c_void_p),
        ("block_size", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("sources", c_void_p),
        ("destinations", c_void_p),
        ("count", c_int64),
        ("type", c_int32),
        ("activations", c_int32),
    ]


class RunStruct(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_int64),
        ("steps", POINTER(StepStruct)),
        ("bound", c_void_p),
        ("bound_strides", c_void_p),
        ("caches", c_void_p),
        ("first", c_int64),
        ("last", c_int64),
        ("cache_type", c_int32),
    ]


class PackStruct(ctypes.Structure):
    _fields_ = [
        ("matrix", MatrixStruct),
        ("source", c_void_p),
        ("source_stride", c_int64),
        ("start", c_int64),
        ("num_rows", c_int64),
        ("source_type", c_int32),
    ]


class SampleStruct(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("type", c_int64),
        ("vocab_size", c_int64),
        ("stride", c_int64),
        ("num_rows", c_int64),
        ("rows", ctypes.c_char_p),
        ("logits_rows", c_void_p),
        ("positions", c_void_p),
        ("first_sample", c_void_p),
        ("errors", c_void_p),
        ("token_ids", c_void_p),
        ("width", c_int64),
        ("listed_ids", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
    ]


class RoundsStruct(ctypes.Structure):
    _fields_ = [
        ("body", c_void_p),
        ("head", c_void_p),
        ("kernels", c_void_p),
        ("num_rows", c_int64),
        ("num_rounds", c_int64),
        ("rows", c_void_p),
        ("records", ctypes.c_char_p),
        ("token_ids", c_void_p),
        ("token_stride", c_int64),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("group_stride", c_int64),
        ("num_groups", c_int64),
        ("block_size", c_int64),
        ("caches", c_void_p),
        ("cache_type", c_int32),
        ("hidden_type", c_int32),
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
        ("logits", c_void_p),
        ("vocab_size", c_int64),
        ("drafts", c_void_p),
    ]


MIRRORED: dict[str, type[ctypes.Structure]] = {  # by their names in csrc; beside them, what each instruction is told
    "Matrix": MatrixStruct,
    "HeadSpec": HeadSpec,
    "Instruction": InstructionStruct,
    "Buffer": BufferStruct,
    "ProgramSpec": ProgramStruct,
    "StepArgs": StepStruct,
    "MoveArgs": MoveStruct,
    "RunArgs": RunStruct,
    "PackArgs": PackStruct,
    "SampleArgs": SampleStruct,
    "RoundsArgs": RoundsStruct,
}


class _Field(ctypes.Structure):
    _fields_ = [("of", ctypes.c_char_p), ("name", ctypes.c_char_p), ("offset", c_int64), ("size", c_int64)]


def compiled_fields() -> dict[tuple[str, str], tuple[int, int]]:
    """(struct, field) -> (offset, size) in bytes, as the library was compiled; the field "" is the whole struct."""
    count = c_int64()
    library = loaded_library()
    fields = ctypes.cast(library.quire_fields(ctypes.byref(count)), POINTER(_Field))
    found = (fields[i] for i in range(count.value))
    return {(field.of.decode(), field.name.decode()): (field.offset, field.size) for field in found}


def mirrored_fields() -> dict[tuple[str, str], tuple[int, int]]:
    """The same of the structs here; an instruction's has the name of its operation."""
    found = {}
    for name, struct in (MIRRORED | {known.name: spec for spec, known in INSTRUCTIONS.items()}).items():
        found[name, ""] = (0, ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            found[name, field] = (place.offset, place.size)
    return found


@cache
def check_layout() -> None:
    """Raise AssertionError, with the field's name, when the library was compiled with other structs than these.

    An operation that one side lacks is a struct that it lacks.
    """
    ours, compiled = mirrored_fields(), compiled_fields()
    for key in ours | compiled:
        here, there = ours.get(key), compiled.get(key)
        name = ".".join(filter(None, key))
        assert here == there, f"{name} is at (offset, size) {here} here and at {there} in the compiled library"
