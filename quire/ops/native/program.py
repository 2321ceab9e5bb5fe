"""Programs: a model's forward pass as native kernel calls, recorded by a builder and run in one call a step.

The compiled model runs one for each step. As a CUDA graph would, it leaves Python out of the step; sizes are free,
though. Where the host does something to a result it is cut into parts: the kernels of a part run in one call, then the
host's function, then the next part. A program may run parts of another one. Knows no models and no recording.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.ops.batch import AttentionBatch
from quire.ops.native.library import Target, loaded_library, operation_names, torch_threads
from quire.ops.native.structs import DTYPE_OF, TYPE_OF, Type, c_struct

_MAX_SLOTS = 2**31  # slots are int32


class StepData:
    """A step as the kernels see it, in one KV group. Contiguous int32 tensors are used as they are, int64 is converted.

    Raises:
        ValueError: tensors of another type, or that disagree about the numbers of tokens and sequences.
    """

    def __init__(self, ids: Tensor, positions: Tensor, batch: AttentionBatch) -> None:
        self.ids, self.positions, self.slot_mapping = _int32(ids), _int32(positions), _int32(batch.slot_mapping)
        self.query_start_loc, self.seq_lens = _int32(batch.query_start_loc), _int32(batch.seq_lens)
        self.block_tables, self.block_size = _int32(batch.block_tables), batch.block_size
        self.tails = None if batch.tails is None else [_int32(tensor) for tensor in batch.tails]
        num_tokens, num_seqs = ids.shape[0], batch.seq_lens.shape[0]  # len() of a tensor takes a microsecond
        if positions.shape[0] != num_tokens or batch.slot_mapping.shape[0] != num_tokens:
            raise ValueError("ids, positions and slots must be of one length")
        if batch.query_start_loc.shape[0] != num_seqs + 1 or batch.block_tables.shape[0] != num_seqs:
            raise ValueError("query_start_loc, seq_lens and block_tables are of different numbers of sequences")

    def struct(self) -> ctypes.Structure:
        """For a kernel call; holds no reference to the tensors."""
        num_seqs, width = self.block_tables.shape
        args = c_struct("StepArgs")(
            num_tokens=self.ids.shape[0],
            num_seqs=num_seqs,
            max_blocks=width,
            block_size=self.block_size,
            ids=self.ids.data_ptr(),
            positions=self.positions.data_ptr(),
            slots=self.slot_mapping.data_ptr(),
            query_start_loc=self.query_start_loc.data_ptr(),
            seq_lens=self.seq_lens.data_ptr(),
            block_tables=self.block_tables.data_ptr(),
        )
        if self.tails is not None:
            starts, counts, slots = self.tails
            args.tail_starts, args.tail_counts = starts.data_ptr(), counts.data_ptr()
            args.tail_slots, args.max_tail = slots.data_ptr(), slots.shape[1]
        return args


def _int32(tensor: Tensor) -> Tensor:
    dtype = tensor.dtype
    if (dtype is not torch.int32 and dtype is not torch.int64) or not tensor.is_contiguous():
        raise ValueError(f"step tensors must be contiguous int32 (or int64), got {dtype}")
    return tensor if dtype is torch.int32 else tensor.to(torch.int32)


class Caches:
    """The KV caches of runs, one a layer, as `quire.attention.native` shapes them."""

    def __init__(self, tensors: Sequence[Tensor], type: Type) -> None:
        self.tensors, self.type = tensors, type
        self._pointers = (ctypes.c_void_p * max(1, len(tensors)))(*(tensor.data_ptr() for tensor in tensors))
        self.address = ctypes.addressof(self._pointers)


@dataclass(frozen=True)
class HostCall:
    """What the host makes of a bound buffer, in place."""

    function: Callable[[Tensor], Tensor]
    buffer: int


Part = range | HostCall  # of a program; a range of instructions is run in one call


@dataclass(frozen=True)
class Plan:
    """What a program is made of.

    Attributes:
        heads: those of instructions on a layer's cache.
        buffers: first the `num_brought` that the caller brings to each run, inputs and then outputs; up to `num_bound`
            those that host calls touch; then the program's own.
        ends: of outputs, the instruction after which each is made.
        needs_step: some of it looks at the step's tokens.
        narrow_at: the last instruction of attention, or the first of all where there is none.
    """

    instructions: list[ctypes.Structure]
    heads: list[ctypes.Structure]
    buffers: list[ctypes.Structure]
    parts: list[Part]
    ends: list[int]
    num_brought: int
    num_bound: int
    needs_step: bool
    narrow_at: int


class Spent(NamedTuple):
    """Seconds in an instruction, of which operation, and the struct it is told beside operands.

    Attributes:
        calls, rows: how often, and for how many rows together.
        inner: it is of an expert, whose rows are not the step's.
    """

    op: str
    spec: Any
    seconds: float
    calls: int = 0
    rows: int = 0
    inner: bool = False


class Program:
    """A recorded program. Made by `ProgramBuilder.finish`; runs on its target's level and threads.

    Args:
        held: what the instructions point to, to live as long as the program.
        check: called after each native part; raises where it can't have computed what it should.

    Attributes:
        handle: the library's own object.
        plan: what it is made of.
        is_whole: one native call runs all of it.
    """

    def __init__(self, plan: Plan, target: Target, held: list[object], check: Callable[[], None] | None = None) -> None:
        self.target, self.check = target, check
        self._library = loaded_library()
        self._held, self.plan = held, plan
        self.is_whole = not any(isinstance(part, HostCall) for part in plan.parts)
        self._bound = [(b.width, Type(b.type)) for b in plan.buffers[: plan.num_bound]]
        self._row_bytes = sum(b.width * DTYPE_OF[Type(b.type)].itemsize for b in plan.buffers if not b.bound)
        self._num_layers = 1 + max((h.layer for h in plan.heads), default=-1)
        self._num_groups = 1 + max((h.group for h in plan.heads), default=0)
        code = (c_struct("Instruction") * len(plan.instructions))(*plan.instructions)
        memory = (c_struct("Buffer") * len(plan.buffers))(*plan.buffers)
        spec = c_struct("ProgramSpec")(
            instructions=ctypes.addressof(code),
            num_instructions=len(code),
            buffers=ctypes.addressof(memory),
            num_buffers=len(memory),
            kernels=target.kernels,
            num_threads=target.num_threads,
            narrow_at=plan.narrow_at,
        )
        self.handle: int = self._library.quire_program_create(ctypes.addressof(spec))
        self._bound_type, self._strides_type = ctypes.c_void_p * len(memory), ctypes.c_int64 * len(memory)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.quire_program_destroy(self.handle)

    def num_bytes(self, num_rows: int) -> int:
        """Memory of its own buffers for that many rows."""
        return num_rows * self._row_bytes

    def reserve(self, num_rows: int) -> None:
        """Allocate and touch the buffers for that many rows, so that no step has to."""
        self._library.quire_program_reserve(self.handle, num_rows)

    def spent(self) -> list[Spent]:
        """Of each instruction, and of its experts', since this was last asked for; nothing the first time."""
        own = ctypes.cast(self._library.quire_program_spent(self.handle), ctypes.POINTER(c_struct("Spent")))
        parts = {part.handle: part for part in self._held if isinstance(part, Program)}
        found, names = list[Spent](), operation_names()
        for number, made in enumerate(self.plan.instructions):
            name, spent = names[made.op], own[number]
            spec = c_struct(name).from_buffer_copy(bytes(made.spec))
            inner = parts[spec.program].spent() if getattr(spec, "program", None) else []
            seconds = spent.seconds - sum(each.seconds for each in inner)
            found.append(Spent(name, spec, seconds, spent.calls, spent.rows))
            found += [each._replace(inner=True) for each in inner]
        return found

    def run(
        self,
        tensors: Sequence[Tensor],
        step: StepData | Sequence[StepData] | None = None,
        caches: Caches | None = None,
        wanted: Tensor | None = None,
    ) -> None:
        """Run the program.

        Args:
            tensors: its inputs and then its outputs, [T, width] each, contiguous rows.
            step: of each KV group, or of the only one; None where the program needs none.
            wanted: int32 [R], rows, ascending, that its only output is made of then, [R, width]: beyond the last
                attention's keys and values no other row is computed.

        Raises:
            ValueError: tensors, steps or caches that don't fit the program or each other.
        """
        num_made = tensors[-1].shape[0]
        steps = (step,) if isinstance(step, StepData) else tuple(step or ())
        num_rows = num_made if wanted is None else steps[0].ids.shape[0]
        if wanted is not None and not (self.is_whole and len(tensors) == 1 and len(wanted) == num_made < num_rows):
            raise ValueError(f"{num_made} of {num_rows} rows, of {len(tensors)} tensors, can't be computed alone")
        self._check_tensors(tensors, num_made)
        self._check_step(num_rows, steps, caches)
        if num_rows == 0:
            return
        groups = (c_struct("StepArgs") * max(1, len(steps)))(*(step.struct() for step in steps))
        bound, strides = self._bound_type(), self._strides_type()  # of each run, as threads may share a program
        shared = [torch.empty(num_rows, width, dtype=DTYPE_OF[type]) for width, type in self._bound[len(tensors) :]]
        memory = [*tensors, *shared]
        for number, tensor in enumerate(memory):
            bound[number], strides[number] = tensor.data_ptr(), tensor.stride(0)
        arguments = c_struct("RunArgs")(
            num_rows=num_rows,
            steps=ctypes.addressof(groups),
            bound=ctypes.addressof(bound),
            bound_strides=ctypes.addressof(strides),
        )
        if caches is not None:
            arguments.caches, arguments.cache_type = caches.address, caches.type
        if wanted is not None:
            arguments.wanted, arguments.num_wanted, arguments.num_steps = wanted.data_ptr(), num_made, len(steps)
        for part in self.plan.parts:
            if isinstance(part, HostCall):
                _call_host(part.function, memory[part.buffer])
                continue
            arguments.first, arguments.last = part.start, part.stop
            self._library.quire_program_run(self.handle, ctypes.addressof(arguments))
            if self.check is not None:
                self.check()

    def _check_tensors(self, tensors: Sequence[Tensor], num_rows: int) -> None:
        if len(tensors) != self.plan.num_brought:
            raise ValueError(f"the program has {self.plan.num_brought} bound tensors, got {len(tensors)}")
        for tensor, (width, type) in zip(tensors, self._bound, strict=False):
            if tuple(tensor.shape) != (num_rows, width) or TYPE_OF.get(tensor.dtype) != type or tensor.stride(1) != 1:
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"expected {type.name} [{num_rows}, {width}], got {got}")

    def _check_step(self, num_rows: int, steps: tuple[StepData, ...], caches: Caches | None) -> None:
        if bool(steps) != self.plan.needs_step or any(step.ids.shape[0] != num_rows for step in steps):
            raise ValueError("a program with attention or embeddings needs a step of as many tokens as rows")
        if steps and len(steps) < self._num_groups:
            raise ValueError(f"the program has {self._num_groups} KV groups, got steps of {len(steps)}")
        layers = () if caches is None else caches.tensors
        if len(layers) < self._num_layers:
            raise ValueError(f"the program has {self._num_layers} layers, got {len(layers)} caches")
        if steps and layers and layers[0].shape[0] * steps[0].block_size > _MAX_SLOTS:
            raise ValueError(
                f"{layers[0].shape[0]} blocks of {steps[0].block_size} tokens are more than the {_MAX_SLOTS} slots "
                "that int32 can count: use fewer blocks."
            )


def _call_host(function: Callable[[Tensor], Tensor], buffer: Tensor) -> None:
    # More threads would spin on after each operation, on the cores that the kernels' need.
    with torch_threads(1), torch.inference_mode():
        result = function(buffer)
        if result.shape != buffer.shape or result.dtype != buffer.dtype:
            raise ValueError(
                f"a host function must return {TYPE_OF[buffer.dtype].name} {[*buffer.shape]}, "
                f"got {result.dtype} {tuple(result.shape)}"
            )
        buffer.copy_(result)
