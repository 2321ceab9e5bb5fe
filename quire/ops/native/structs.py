"""The structs of csrc, for ctypes: field by field the same, checked when first used.

What an instruction is told beside its operands is declared by `instruction` in the file of its operation; which
operations there are, and their numbers, the library says (csrc/ops.h). Used by the builder and by all who call kernels.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

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


_KINDS = {"ptr": c_void_p, "bytes": c_char_p, "i64": c_int64, "i32": c_int32, "f32": c_float}


def declared(fields: str) -> list[tuple[str, Any]]:
    """The fields of "kind name name; kind name", as a C struct would declare them."""
    kinds = (part.split() for part in fields.split(";"))
    return [(name, _KINDS[kind]) for kind, *names in kinds for name in names]


class MatrixStruct(ctypes.Structure):
    _fields_ = declared("ptr data scales; i64 rows cols; i32 type")


class HeadSpec(ctypes.Structure):
    _fields_ = declared("i64 num_heads num_kv_heads head_dim; i32 layer group")


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
    _fields_ = declared("i64 width; i32 type bound")


class ProgramStruct(ctypes.Structure):
    _fields_ = declared(
        "ptr instructions; i64 num_instructions; ptr buffers; i64 num_buffers; ptr kernels; i32 num_threads"
    )


class StepStruct(ctypes.Structure):
    _fields_ = declared(
        "i64 num_tokens num_seqs max_blocks block_size; "
        "ptr ids positions slots query_start_loc seq_lens block_tables tail_starts tail_counts tail_slots; "
        "i64 max_tail"
    )


class MoveStruct(ctypes.Structure):
    _fields_ = declared(
        "ptr cache; i64 block_size num_kv_heads head_dim; ptr sources destinations; i64 count; i32 type activations"
    )


class RunStruct(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_int64),
        ("steps", POINTER(StepStruct)),
        *declared("ptr bound bound_strides caches; i64 first last; i32 cache_type"),
    ]


class PackStruct(ctypes.Structure):
    _fields_ = [("matrix", MatrixStruct), *declared("ptr source; i64 source_stride start num_rows; i32 source_type")]


class SampleStruct(ctypes.Structure):
    _fields_ = declared(
        "ptr logits; i64 type vocab_size stride num_rows; bytes rows; "
        "ptr logits_rows positions first_sample errors token_ids; i64 width; ptr listed_ids logprobs ranks masks drawn"
    )


class RoundsStruct(ctypes.Structure):
    _fields_ = declared(
        "ptr body head kernels; i64 num_rows num_rounds; ptr rows; bytes records; ptr token_ids; i64 token_stride; "
        "ptr block_tables; i64 table_stride group_stride num_groups block_size; ptr caches; "
        "i32 cache_type hidden_type; ptr hidden; i64 hidden_stride; ptr logits; i64 vocab_size; ptr drafts"
    )


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
