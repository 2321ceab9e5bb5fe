"""What an operation is: a plain-torch reference, which says what it means, and others that carry it out.

Each file beside this one declares some with `@op`. Called with tensors, the reference computes, or on a device that has
one a kernel; called with a builder's values in place of tensors, the native build appends to the program. Here alone is
decided which. Layers don't see the difference.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

from quire.ops.native.builder import StepIndex, Value

P = ParamSpec("P")
R = TypeVar("R")

OPERATIONS: dict[str, "Operation[Any, Any]"] = {}


class Operation(Generic[P, R]):
    """A named operation of `quire.ops`.

    Attributes:
        reference: the plain-torch function. Row i of its result is a function of row i of the input alone, to the last
            bit, whatever the number of rows. Torch does not promise that, hence what the references refrain from: they
            multiply in tiles of one fixed height, and use only such functions whose vector body and scalar tail agree
            (no sigmoid, rsqrt, silu, gelu).
        build: the same of recorded values; None where there is nothing to record.
        kernel: the same, for tensors on a device of the type `kernel_device`; None where none is installed
            (`quire.ops.triton`). Rows of its results depend on rows of the input alone, too, in an order of its own.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        self.build: Callable[..., Any] | None = None
        self.kernel: Callable[..., Any] | None = None
        self.kernel_device = ""
        self.name = reference.__name__
        functools.update_wrapper(self, reference)
        OPERATIONS[self.name] = self

    def native(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the build: called as the reference is, with values in place of tensors of activations."""
        self.build = build
        return build

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for argument in args:
            if isinstance(argument, (Value, StepIndex)):
                assert self.build is not None, f"{self.name} can't be recorded"
                return self.build(*args, **kwargs)
            if self.kernel and isinstance(argument, Tensor) and argument.device.type == self.kernel_device:
                return self.kernel(*args, **kwargs)
        return self.reference(*args, **kwargs)


op = Operation  # that the function below it is the meaning of
