"""Records a model's forward pass as a native program: kernel calls, listed once and then run in one call a step.

Recording runs the model's own `forward` with `Value`s in place of tensors: each operation of `quire.ops` appends itself
to the `ProgramBuilder` that the value belongs to. Neighbours are fused where a kernel does both (a product with the
activation or the residual sum after it). What no kernel does to a result, as bringing it from other nodes, the host
does between two parts of the program. `ProgramBuilder.finish` assigns the buffers and makes the `Program`.
"""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from quire.ops.native.library import Target, default_target
from quire.ops.native.matrix import PackedMatrix
from quire.ops.native.program import HostCall, Part, Plan, Program
from quire.ops.native.structs import DTYPE_OF, TYPE_OF, Epilogue, Type, c_struct, instruction


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
        self.builder, self.width, self.type = builder, width, type
        self.kept = False  # somebody else wants it too: it is not fused into what follows
        self.fused = False  # no longer computed: only what followed it is

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return DTYPE_OF[self.type]

    def __add__(self, other: "Value") -> "Value":
        return self.builder.add(self, other)

    def __mul__(self, factor: float) -> "Value":
        return self.builder.scale(self, factor)

    __rmul__ = __mul__


def recorded(value: Value | StepIndex) -> Tensor:
    """The value, for code that says Tensor and only hands it on: layers are written for tensors."""
    return cast(Tensor, cast(Any, value))


@dataclass
class Step:
    """An instruction whose buffers are still values; in place where it writes what it reads.

    Attributes:
        spec: what it is told beside them.
        needs_step: it looks at the step's tokens, not just at rows of activations.
        after: what the host then makes of its result, in place.
    """

    op: str
    spec: ctypes.Structure
    reads: list[Value]
    writes: Value
    needs_step: bool
    after: Callable[[Tensor], Tensor] | None = None

    def struct(self, number: dict[Value, int]) -> ctypes.Structure:
        return instruction(self.op, self.spec, [number[v] for v in self.reads], number[self.writes])


_FUSED = "a value was used after it was fused into another"


class ProgramBuilder:
    """Collects the instructions of one program.

    Args:
        dtype: of activations, vectors and biases; float32 or bfloat16.
        target: the level and the threads that the program will run on; default: `default_target`.
    """

    def __init__(self, dtype: torch.dtype, target: Target | None = None) -> None:
        self.type = TYPE_OF[dtype]
        self.dtype = dtype
        self.target = target or default_target()
        self._steps: list[Step] = []
        self._inputs: list[Value] = []
        self._held: list[object] = []  # tensors that instructions point to
        self.check: Callable[[], None] | None = None  # raises after a run that other ranks have spoiled

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

    def keep(self, value: Value) -> Value:
        """The value, which is to be an output beside what follows from it (a tap): nothing is fused into it."""
        value.kept = True
        return value

    def append(
        self,
        op: str,
        reads: list[Value],
        writes: int | Value,
        *,
        type: Type | None = None,
        needs_step: bool = False,
        after: Callable[[Tensor], Tensor] | None = None,
        **told: Any,
    ) -> Value:
        """Record an operation of csrc's list.

        Args:
            writes: the width of its result, or what is changed in place.
            type: of the result; the activations' by default.
            needs_step: it looks at the step's tokens, not just at rows of activations.
            after: what the host then makes of the result.
            told: the fields of its struct.
        """
        if isinstance(writes, int):
            writes = Value(self, writes, self.type if type is None else type)
        assert not any(value.fused for value in reads), _FUSED
        self._steps.append(Step(op, c_struct(op)(**told), reads, writes, needs_step, after))
        return writes

    def add(self, x: Value, y: Value) -> Value:
        """The sum of two activations; `x` is best the product that was just recorded."""
        last = self._steps[-1] if self._steps else None
        if last is None:
            product = None
        elif last.op == "gather" and last.writes is x and not x.kept:  # each rank adds its columns of the sum
            product = self.fusible_product(last.reads[0], -2)
        elif last.op == "reduce" and last.writes is x and not (x.kept or last.after) and len(last.reads) == 1:
            product = last  # after all ranks' addends; where the host adds up, each rank would bring it
        else:
            product = self.fusible_product(x)
        if last is not None and product is not None and y is not x and y.type == self.type:
            if product.op == "linear":
                product.spec.residual_start = 0 if last is product else last.spec.first
            product.reads.append(y)
            return self.fuse(last, x.width)
        return self.append("add", [x, y], x.width, type=x.type, size=x.width)

    def scale(self, x: Value, factor: float) -> Value:
        """``x * factor``."""
        return self.append("scale", [x], x.width, type=x.type, size=x.width, factor=factor)

    def fusible_product(self, x: Value, place: int = -1) -> Step | None:
        """The product that made `x`, if it is the step at `place` and nothing has been fused to it yet."""
        step = self._steps[place] if len(self._steps) >= -place else None
        if step is None or step.writes is not x or step.op != "linear":
            return None
        whole = len(step.reads) == 1 and step.spec.epilogue == Epilogue.NONE and step.spec.weight.rows == x.width
        return step if whole and x.type == self.type and not x.kept else None

    def fuse(self, product: Step, width: int) -> Value:
        """The result of a product that has just been given more to do; what it made before is gone."""
        product.writes.fused = True
        product.writes = Value(self, width, self.type)
        assert not any(value.fused for value in product.reads), _FUSED
        return product.writes

    def matrix(self, matrix: PackedMatrix) -> ctypes.Structure:
        """For a spec; the program keeps the matrix."""
        self._held.append(matrix)
        return matrix.struct()

    def vector(self, vector: Tensor | None, size: int) -> int | None:
        """The address of `size` numbers in the activations' type, for a spec; the program keeps them.

        Raises:
            ValueError: another size, type or layout.
        """
        if vector is None:
            return None
        if vector.dtype != self.dtype or vector.numel() != size or not vector.is_contiguous():
            raise ValueError(f"expected {size} contiguous {self.dtype}, got {vector.dtype} {tuple(vector.shape)}")
        return self.address(vector)

    def address(self, tensor: Tensor) -> int:
        """Of a tensor's first element, for a spec; the program keeps the tensor."""
        self._held.append(tensor)
        return tensor.data_ptr()

    def hold(self, owner: object, struct: ctypes.Structure) -> int:
        """The address of a struct, for a spec; the program keeps whose it is."""
        self._held.append(owner)
        return ctypes.addressof(struct)

    def part(self, program: Program) -> int:
        """A program that an operation runs, for its spec."""
        assert program.is_whole, "an operation waits for nobody"
        self._held.append(program)
        self.check = self.check or program.check
        return program.handle

    def tell(self, value: Value, **told: Any) -> Value:
        """Tell the operations more that were just recorded and made `value`."""
        made = list(itertools.takewhile(lambda step: step.writes is value, reversed(self._steps)))
        assert made, "another operation was recorded since"
        for step in made:
            for name, what in told.items():
                setattr(step.spec, name, what)
        return value

    def finish(self, outputs: Value | Sequence[Value], *, apart: bool = False) -> Program:
        """The program that computes `outputs`, one or several.

        Args:
            apart: they are functions, recorded one after the other, that an operation of another program runs by its
                needs: each makes the same buffer, and all buffers are the caller's.

        Raises:
            ValueError: an output that is an input, or there twice.
        """
        outputs = [outputs] if isinstance(outputs, Value) else list(outputs)
        bound = [*self._inputs, *outputs]
        if len(set(bound)) < len(bound):
            raise ValueError("an output must be computed, and be there once")
        assert not any(value.fused for value in outputs), "an output was fused into another value; keep() it"
        return Program(_plan(self._steps, self._inputs, outputs, apart), self.target, self._held, self.check)


def _values(step: Step) -> list[Value]:
    return [*step.reads, step.writes]


def _plan(steps: list[Step], inputs: Sequence[Value], outputs: Sequence[Value], apart: bool) -> Plan:
    """Number the buffers: first those that the caller brings, then what the host or who runs it touches."""
    bound = [*inputs, *(outputs[:1] if apart else outputs)]
    number = {value: i for i, value in enumerate(bound)}
    buffers = [c_struct("Buffer")(width=value.width, type=value.type, bound=True) for value in bound]
    if apart:
        number |= dict.fromkeys(outputs, len(inputs))
    every = {value for step in steps for value in _values(step)}
    touched = every if apart else {step.writes for step in steps if step.after is not None}
    _assign(steps, touched - number.keys(), number, buffers, bound=True)
    num_bound, made = len(buffers), {step.writes: i for i, step in enumerate(steps)}
    _assign(steps, every - number.keys(), number, buffers, bound=False)
    return Plan(
        [step.struct(number) for step in steps],
        [step.spec.heads for step in steps if hasattr(step.spec, "heads")],
        buffers,
        _parts(steps, number),
        [made[value] + 1 for value in outputs],
        num_brought=len(bound),
        num_bound=num_bound,
        needs_step=any(step.needs_step for step in steps),
        narrow_at=max((i for i, step in enumerate(steps) if step.op == "attention"), default=0),
    )


def _assign(
    steps: list[Step], values: set[Value], number: dict[Value, int], buffers: list[ctypes.Structure], bound: bool
) -> None:
    """Give these values buffers, each of which is used again once its value is done with."""
    last_use = {value: i for i, step in enumerate(steps) for value in _values(step)}
    free: dict[tuple[int, Type], list[int]] = {}
    for i, step in enumerate(steps):
        here = [value for value in dict.fromkeys(_values(step)) if value in values]
        for value in here:
            if value not in number:
                kind = (value.width, value.type)
                if not free.get(kind):
                    buffers.append(c_struct("Buffer")(width=value.width, type=value.type, bound=bound))
                    free[kind] = [len(buffers) - 1]
                number[value] = free[kind].pop()
        for value in here:
            if last_use[value] == i:
                free.setdefault((value.width, value.type), []).append(number[value])


def _parts(steps: list[Step], number: dict[Value, int]) -> list[Part]:
    """The steps as native parts with host calls between them."""
    parts, first = list[Part](), 0
    for last, step in enumerate(steps, 1):
        if step.after is not None:
            parts += [range(first, last), HostCall(step.after, number[step.writes])]
            first = last
    return [*parts, range(first, len(steps))] if first < len(steps) else parts
