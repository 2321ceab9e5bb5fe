"""What no kernel does: a function in torch, between the kernels of a recorded program or by itself."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from quire.ops.native.builder import ProgramBuilder, Value, recorded


def host(function: Callable[..., Tensor], inputs: Sequence[Tensor], width: int) -> Tensor:
    """``function(*inputs)`` -> [T, width]; a row of it must be a function of that row of the inputs alone."""
    if isinstance(inputs[0], Value):
        values = cast(Sequence[Any], inputs)
        return recorded(values[0].builder.host(function, values, width))
    return function(*inputs)


def on_rows(function: Callable[[Tensor], Tensor], like: Tensor) -> Callable[[Tensor], Tensor]:
    """`function` of rows as wide as those of `like`, for use within a host function.

    Where a program is being recorded the function is recorded too, as a program of its own for the same target.
    """
    if not isinstance(like, Value):
        return function
    builder = ProgramBuilder(like.builder.dtype, like.builder.target)
    out = cast(Value, function(recorded(builder.input(like.width))))
    program = builder.finish(out)

    def run(rows: Tensor) -> Tensor:
        result = torch.empty(rows.shape[0], out.width, dtype=out.dtype)
        program.run([rows, result])
        return result

    return run
