"""Programs: a model's forward pass as a list of kernel calls, recorded once and then run in one call a step.

Recording runs the model's own `forward` with `Value`s in place of tensors: each operation of `quire.ops` appends
itself to the `ProgramBuilder` that the value belongs to. Neighbours are fused where a kernel does both (a product with
the activation or the residual sum after it). `ProgramBuilder.finish` assigns the buffers and makes the `Program`, which
the worker runs. As a CUDA graph would, it leaves Python out of the step; sizes are free, though.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from quire.ops.native.library import loaded_library
from quire.ops.native.matrix import PackedMatrix
from quire.ops.native.structs import (
    TYPE_OF,
    BufferStruct,
    Epilogue,
    InstructionStruct,
    MatrixStruct,
    Op,
    RunStruct,
    StepStruct,
    Type,
    check_layout,
)

MAX_HEAD_DIM = 512  # as kMaxHeadDim in csrc/elementwise.h


@dataclass(frozen=True)
class StepIndex:
    """In place of the tensor of token ids, or of positions plus an offset."""

    builder: "ProgramBuilder"
    by_position: bool
    offset: int = 0

    def __add__(self, offset: int) -> "StepIndex":
        return StepIndex(self.builder, self.by_position, self.offset + offset)


class Value:
    """In place of an activation [T, width], T being the step's number of tokens."""

    def __init__(self, builder: "ProgramBuilder", width: int, type: Type) -> None:
        self.builder = builder
        self.width = width
        self.type = type
        self.fused = False  # no longer computed: only what followed it is

    def __add__(self, other: "Value") -> "Value":
        return self.builder.add(self, other)


def recorded(value: Value | StepIndex) -> Tensor:
    """The value, for code that says Tensor and only hands it on: layers are written for tensors."""
    return cast(Tensor, cast(Any, value))


@dataclass(frozen=True)
class HeadShape:
    """How the columns of a merged projection fall into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Preparation:
    """What happens to queries and keys before attention, besides the write to the cache.

    Attributes:
        q_norm, k_norm: weights of an RMSNorm over each head, [D]; None for none.
        cos_sin: float32 [positions, rotary_dim], cosines then sines; None for no rotation.
    """

    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    cos_sin: Tensor | None = None


@dataclass
class _Step:
    """An instruction whose buffers are still values."""

    struct: InstructionStruct
    reads: list[Value]
    writes: Value
    other: Value | None = None


class ProgramBuilder:
    """Collects the instructions of one program.

    Args:
        dtype: of activations, vectors and biases; float32 or bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        check_layout()
        self.type = TYPE_OF[dtype]
        self.dtype = dtype
        self._steps: list[_Step] = []
        self._inputs: list[Value] = []
        self._kept: list[object] = []  # tensors that instructions point to

    @property
    def ids(self) -> StepIndex:
        """In place of the token ids [T]."""
        return StepIndex(self, by_position=False)

    @property
    def positions(self) -> StepIndex:
        """In place of the positions [T]."""
        return StepIndex(self, by_position=True)

    def input(self, width: int) -> Value:
        """An activation that the caller brings to each run."""
        value = Value(self, width, self.type)
        self._inputs.append(value)
        return value

    def embedding(self, index: StepIndex, table: PackedMatrix) -> Value:
        """Rows of `table`."""
        out = Value(self, table.cols, self.type)
        struct = InstructionStruct(
            op=Op.EMBEDDING, by_position=index.by_position, offset=index.offset, weight=self._matrix(table)
        )
        return self._append(struct, [], out)

    def linear(
        self, x: Value, weight: PackedMatrix, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Value:
        """``x @ weight.T + bias``, in the activations' type or in `out_dtype`."""
        if x.width != weight.cols:
            raise ValueError(f"a matrix [{weight.rows}, {weight.cols}] can't multiply rows of {x.width}")
        out = Value(self, weight.rows, self.type if out_dtype is None else TYPE_OF[out_dtype])
        struct = InstructionStruct(op=Op.LINEAR, weight=self._matrix(weight), bias=self._vector(bias, weight.rows))
        return self._append(struct, [x], out)

    def norm(self, x: Value, weight: Tensor | None, bias: Tensor | None, eps: float, *, subtract_mean: bool) -> Value:
        """RMSNorm, or LayerNorm where `subtract_mean`."""
        struct = InstructionStruct(
            op=Op.NORM,
            vector=self._vector(weight, x.width),
            bias=self._vector(bias, x.width),
            eps=eps,
            subtract_mean=subtract_mean,
            size=x.width,
        )
        return self._append(struct, [x], Value(self, x.width, self.type))

    def activation(self, x: Value, function: Epilogue) -> Value:
        """An activation function; SILU_MUL takes [gate, up] and halves the width."""
        halves = function is Epilogue.SILU_MUL
        width = x.width // 2 if halves else x.width
        out = Value(self, width, self.type)
        product = self._fusible_product(x)
        # The two halves of a gated product are finished block by block: they must fall into whole blocks of 16.
        if product is not None and (not halves or width % 16 == 0):
            product.struct.epilogue = function
            product.writes, x.fused = out, True
            return out
        return self._append(InstructionStruct(op=Op.ACTIVATION, epilogue=function, size=width), [x], out)

    def add(self, x: Value, y: Value) -> Value:
        """The sum of two activations; `x` is best the product that was just recorded."""
        out = Value(self, x.width, self.type)
        product = self._fusible_product(x)
        if product is not None and y is not x:
            product.other = y
            product.writes, x.fused = out, True
            return out
        step = InstructionStruct(op=Op.ADD, size=x.width)
        return self._append(step, [x], out, other=y)

    def prepare(self, qkv: Value, heads: HeadShape, preparation: Preparation, *, layer: int) -> Value:
        """Norm and rotate queries and keys of qkv [T, (Hq + 2 Hkv) D], in place; write the cache."""
        if qkv.width != (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim:
            raise ValueError(f"{qkv.width} columns are not {heads}")
        table = preparation.cos_sin
        rotation = {}
        if table is not None:
            if table.dtype != torch.float32 or not table.is_contiguous() or table.shape[1] > heads.head_dim:
                raise ValueError("cos_sin must be contiguous float32 [positions, rotary_dim <= head_dim]")
            self._kept.append(table)
            rotation = {"cos_sin": table.data_ptr(), "rotary_dim": table.shape[1]}
        struct = InstructionStruct(
            op=Op.PREPARE,
            q_norm=self._vector(preparation.q_norm, heads.head_dim),
            k_norm=self._vector(preparation.k_norm, heads.head_dim),
            eps=preparation.eps,
            layer=layer,
            **_head_fields(heads),
            **rotation,
        )
        return self._append(struct, [qkv], qkv)

    def attend(self, query: Value, heads: HeadShape, *, layer: int, scale: float, window: int | None) -> Value:
        """Causal attention to the cache: query [T, Hq D], or wider (what follows is not read), -> [T, Hq D]."""
        struct = InstructionStruct(op=Op.ATTENTION, layer=layer, scale=scale, window=window or 0, **_head_fields(heads))
        return self._append(struct, [query], Value(self, heads.num_heads * heads.head_dim, self.type))

    def finish(self, output: Value) -> "Program":
        """The program that computes `output`."""
        bound = [*self._inputs, output]
        last_use = {id(value): i for i, step in enumerate(self._steps) for value in _values(step)}
        numbers = {id(value): i for i, value in enumerate(bound)}
        buffers = [BufferStruct(value.width, value.type, True) for value in bound]
        free: dict[tuple[int, Type], list[int]] = {}
        for i, step in enumerate(self._steps):
            for value in _values(step):
                if id(value) not in numbers:
                    kind = (value.width, value.type)
                    if not free.get(kind):
                        buffers.append(BufferStruct(value.width, value.type, False))
                        free[kind] = [len(buffers) - 1]
                    numbers[id(value)] = free[kind].pop()
            for value in {id(v): v for v in _values(step)}.values():
                if last_use[id(value)] == i and numbers[id(value)] >= len(bound):
                    free.setdefault((value.width, value.type), []).append(numbers[id(value)])
            step.struct.in_ = numbers[id(step.reads[0])] if step.reads else -1
            step.struct.other = numbers[id(step.other)] if step.other is not None else -1
            step.struct.out = numbers[id(step.writes)]
        return Program([step.struct for step in self._steps], buffers, [v.width for v in bound], self.dtype, self._kept)

    def _append(self, struct: InstructionStruct, reads: list[Value], out: Value, other: Value | None = None) -> Value:
        step = _Step(struct, reads, out, other)
        assert not any(value.fused for value in _values(step)), "a value was used after it was fused into another"
        self._steps.append(step)
        return out

    def _fusible_product(self, x: Value) -> _Step | None:
        """The product that made `x`, if it is the latest step and nothing has been fused to it yet."""
        step = self._steps[-1] if self._steps else None
        if step is None or step.writes is not x or step.struct.op != Op.LINEAR or step.other is not None:
            return None
        return step if step.struct.epilogue == Epilogue.NONE and x.type == self.type else None

    def _matrix(self, matrix: PackedMatrix) -> MatrixStruct:
        self._kept.append(matrix)
        return matrix.struct()

    def _vector(self, vector: Tensor | None, size: int) -> int | None:
        if vector is None:
            return None
        if vector.dtype != self.dtype or vector.numel() != size or not vector.is_contiguous():
            raise ValueError(f"expected {size} contiguous {self.dtype}, got {vector.dtype} {tuple(vector.shape)}")
        self._kept.append(vector)
        return vector.data_ptr()


def _head_fields(heads: HeadShape) -> dict[str, int]:
    if heads.head_dim > MAX_HEAD_DIM or heads.num_heads % heads.num_kv_heads:
        raise ValueError(
            f"{heads} can't be attended to: head_dim is at most {MAX_HEAD_DIM}, heads come in whole groups"
        )
    return {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}


def _values(step: _Step) -> list[Value]:
    return [*step.reads, *([step.other] if step.other is not None else []), step.writes]


@dataclass(frozen=True)
class StepData:
    """A step as the kernels see it; contiguous int64 tensors, shaped as in `quire.attention.base.AttentionBatch`."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    block_size: int

    def struct(self) -> StepStruct:
        """For a kernel call; holds no reference to the tensors."""
        tensors = (self.ids, self.positions, self.slots, self.query_start_loc, self.seq_lens, self.block_tables)
        for tensor in tensors:
            if tensor.dtype != torch.int64 or not tensor.is_contiguous():
                raise ValueError(f"step tensors must be contiguous int64, got {tensor.dtype}")
        num_tokens, num_seqs = len(self.ids), len(self.seq_lens)
        if len(self.positions) != num_tokens or len(self.slots) != num_tokens:
            raise ValueError("ids, positions and slots must be of one length")
        if len(self.query_start_loc) != num_seqs + 1 or len(self.block_tables) != num_seqs:
            raise ValueError("query_start_loc, seq_lens and block_tables are of different numbers of sequences")
        return StepStruct(num_tokens, num_seqs, self.block_tables.shape[1], *(t.data_ptr() for t in tensors))


@dataclass(frozen=True)
class Caches:
    """The KV caches of a run, one a layer, as `quire.attention.native` shapes them."""

    tensors: Sequence[Tensor]
    type: Type


class Program:
    """A recorded program. Made by `ProgramBuilder.finish`; runs on the level that was in use then."""

    def __init__(
        self,
        instructions: list[InstructionStruct],
        buffers: list[BufferStruct],
        widths: list[int],
        dtype: torch.dtype,
        kept: list[object],
    ) -> None:
        self._library = loaded_library()
        code = (InstructionStruct * len(instructions))(*instructions)
        memory = (BufferStruct * len(buffers))(*buffers)
        self._widths = widths
        self._types = [Type(b.type) for b in buffers[: len(widths)]]
        self._num_buffers = len(buffers)
        self._kept = kept
        self._needs_step = any(i.op in (Op.EMBEDDING, Op.PREPARE, Op.ATTENTION) for i in instructions)
        cached = (i.layer for i in instructions if i.op in (Op.PREPARE, Op.ATTENTION))
        self._num_layers = 1 + max(cached, default=-1)
        self._handle = self._library.quire_program_create(
            ctypes.addressof(code), len(code), ctypes.addressof(memory), len(memory), TYPE_OF[dtype]
        )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.quire_program_destroy(self._handle)
            self._handle = None

    def reserve(self, num_rows: int) -> None:
        """Allocate and touch the buffers for that many rows, so that no step has to."""
        self._library.quire_program_reserve(self._handle, num_rows)

    def times(self) -> dict[str, float]:
        """Seconds spent in each kind of instruction since this was first called, for profiles."""
        seconds = self._library.quire_program_times(self._handle)
        return {op.name.lower(): seconds[op] for op in Op}

    def run(self, tensors: Sequence[Tensor], step: StepData | None = None, caches: Caches | None = None) -> None:
        """Run the program: `tensors` are its inputs and then its output, [T, width] each, contiguous rows."""
        num_rows = tensors[-1].shape[0]
        if len(tensors) != len(self._widths):
            raise ValueError(f"the program has {len(self._widths)} bound tensors, got {len(tensors)}")
        for tensor, width, type in zip(tensors, self._widths, self._types, strict=True):
            if tuple(tensor.shape) != (num_rows, width) or TYPE_OF.get(tensor.dtype) != type or tensor.stride(1) != 1:
                raise ValueError(
                    f"expected {type.name} [{num_rows}, {width}], got {tensor.dtype} {tuple(tensor.shape)}"
                )
        if (step is None) == self._needs_step or (step is not None and len(step.ids) != num_rows):
            raise ValueError("a program with attention or embeddings needs a step of as many tokens as rows")
        layers = () if caches is None else caches.tensors
        if len(layers) < self._num_layers:
            raise ValueError(f"the program has {self._num_layers} layers, got {len(layers)} caches")
        if num_rows == 0:
            return
        struct = StepStruct() if step is None else step.struct()
        padding = self._num_buffers - len(tensors)
        bound = (ctypes.c_void_p * self._num_buffers)(*(t.data_ptr() for t in tensors), *[None] * padding)
        strides = (ctypes.c_int64 * self._num_buffers)(*(t.stride(0) for t in tensors), *[0] * padding)
        cache_pointers = (ctypes.c_void_p * max(1, len(layers)))(*(c.data_ptr() for c in layers))
        arguments = RunStruct(
            num_rows,
            ctypes.pointer(struct),
            ctypes.addressof(bound),
            ctypes.addressof(strides),
            ctypes.addressof(cache_pointers),
            step.block_size if step is not None else 0,
            caches.type if caches is not None else 0,
        )
        self._library.quire_program_run(self._handle, ctypes.addressof(arguments))
