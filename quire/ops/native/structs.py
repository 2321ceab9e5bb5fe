"""The structs of csrc/kernels.h and csrc/program.h, for ctypes: field by field the same, checked when first used."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache

import torch

from quire.ops.native.library import loaded_library


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


GATED = frozenset({Epilogue.SILU_MUL, Epilogue.GELU_MUL, Epilogue.GELU_TANH_MUL})  # function(first half) * second half


class Op(IntEnum):
    """Instructions of a program."""

    EMBEDDING = 0
    NORM = 1
    LINEAR = 2
    PREPARE = 3
    ATTENTION = 4
    ADD = 5
    ACTIVATION = 6
    SCALE = 7
    SOFTCAP = 8


TYPE_OF = {torch.float32: Type.F32, torch.bfloat16: Type.BF16, torch.int8: Type.I8}
DTYPE_OF = {type: dtype for dtype, type in TYPE_OF.items()}


class MatrixStruct(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("scales", c_void_p), ("rows", c_int64), ("cols", c_int64), ("type", c_int32)]


class EmbeddingSpec(ctypes.Structure):
    _fields_ = [("table", MatrixStruct), ("offset", c_int64), ("by_position", c_int32)]


class NormSpec(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("size", c_int64),
        ("eps", c_float),
        ("subtract_mean", c_int32),
        ("plus_one", c_int32),
    ]


class LinearSpec(ctypes.Structure):
    _fields_ = [("weight", MatrixStruct), ("bias", c_void_p), ("epilogue", c_int32)]


class HeadSpec(ctypes.Structure):
    _fields_ = [
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("layer", c_int32),
        ("group", c_int32),
    ]


class PrepareSpec(ctypes.Structure):
    _fields_ = [
        ("heads", HeadSpec),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("rotary_dim", c_int64),
        ("eps", c_float),
        ("plus_one", c_int32),
    ]


class AttentionSpec(ctypes.Structure):
    _fields_ = [
        ("heads", HeadSpec),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class ActivationSpec(ctypes.Structure):
    _fields_ = [("size", c_int64), ("function", c_int32)]


class ElementwiseSpec(ctypes.Structure):
    _fields_ = [("size", c_int64), ("factor", c_float)]


class SpecUnion(ctypes.Union):
    _fields_ = [
        ("embedding", EmbeddingSpec),
        ("norm", NormSpec),
        ("linear", LinearSpec),
        ("prepare", PrepareSpec),
        ("attention", AttentionSpec),
        ("activation", ActivationSpec),
        ("elementwise", ElementwiseSpec),
    ]


Spec = EmbeddingSpec | NormSpec | LinearSpec | PrepareSpec | AttentionSpec | ActivationSpec | ElementwiseSpec
SPEC_FIELD = {  # which member of the union an instruction's spec is
    EmbeddingSpec: "embedding",
    NormSpec: "norm",
    LinearSpec: "linear",
    PrepareSpec: "prepare",
    AttentionSpec: "attention",
    ActivationSpec: "activation",
    ElementwiseSpec: "elementwise",
}


class InstructionStruct(ctypes.Structure):
    _fields_ = [("op", c_int32), ("inputs", c_int32 * 2), ("output", c_int32), ("spec", SpecUnion)]


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
        ("type", c_int32),
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


MIRRORED: dict[str, type[ctypes.Structure]] = {  # by their names in csrc
    "Matrix": MatrixStruct,
    "EmbeddingSpec": EmbeddingSpec,
    "NormSpec": NormSpec,
    "LinearSpec": LinearSpec,
    "HeadSpec": HeadSpec,
    "PrepareSpec": PrepareSpec,
    "AttentionSpec": AttentionSpec,
    "ActivationSpec": ActivationSpec,
    "ElementwiseSpec": ElementwiseSpec,
    "Instruction": InstructionStruct,
    "Buffer": BufferStruct,
    "ProgramSpec": ProgramStruct,
    "StepArgs": StepStruct,
    "RunArgs": RunStruct,
    "PackArgs": PackStruct,
    "SampleArgs": SampleStruct,
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
    """The same of the structs here."""
    found = {}
    for name, struct in MIRRORED.items():
        found[name, ""] = (0, ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            found[name, field] = (place.offset, place.size)
    return found


@cache
def check_layout() -> None:
    """Raise AssertionError, with the field's name, when the library was compiled with other structs than these."""
    ours, compiled = mirrored_fields(), compiled_fields()
    for key in ours | compiled:
        here, there = ours.get(key), compiled.get(key)
        name = ".".join(filter(None, key))
        assert here == there, f"{name} is at (offset, size) {here} here and at {there} in the compiled library"
    num_ops = loaded_library().quire_num_ops()
    assert num_ops == len(Op), f"{len(Op)} operations here, {num_ops} in the compiled library"
