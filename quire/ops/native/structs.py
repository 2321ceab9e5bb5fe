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


class Op(IntEnum):
    """Instructions of a program."""

    EMBEDDING = 0
    NORM = 1
    LINEAR = 2
    PREPARE = 3
    ATTENTION = 4
    ADD = 5
    ACTIVATION = 6


TYPE_OF = {torch.float32: Type.F32, torch.bfloat16: Type.BF16, torch.int8: Type.I8}


class MatrixStruct(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("scales", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("type", c_int32),
    ]


class InstructionStruct(ctypes.Structure):
    _fields_ = [
        ("op", c_int32),
        ("epilogue", c_int32),
        ("in_", c_int32),
        ("other", c_int32),
        ("out", c_int32),
        ("subtract_mean", c_int32),
        ("layer", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("by_position", c_int32),
        ("weight", MatrixStruct),
        ("vector", c_void_p),
        ("bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("rotary_dim", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("window", c_int64),
        ("offset", c_int64),
        ("size", c_int64),
    ]


class BufferStruct(ctypes.Structure):
    _fields_ = [("width", c_int64), ("type", c_int32), ("bound", c_int32)]


class StepStruct(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("max_blocks", c_int64),
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
        ("step", POINTER(StepStruct)),
        ("bound", c_void_p),
        ("bound_strides", c_void_p),
        ("caches", c_void_p),
        ("block_size", c_int64),
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


@cache
def check_layout() -> None:
    """Raise AssertionError when the library was compiled with other structs than these."""
    mirrored = (MatrixStruct, InstructionStruct, BufferStruct, RunStruct, StepStruct, PackStruct)
    for i, struct in enumerate(mirrored):
        size = loaded_library().quire_struct_size(i)
        assert size == ctypes.sizeof(struct), f"{struct.__name__}: {ctypes.sizeof(struct)} bytes here, {size} compiled"
