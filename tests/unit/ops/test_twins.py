"""Every operation's native build against its reference, made from the table of operations: none can be left out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from native_cases import DTYPES, EPSILON, at_page_end, draw, packed, run
from sweeping import each
from torch import Tensor

from quire import ops
from quire.ops.batch import AttentionBatch
from quire.ops.native.builder import ProgramBuilder
from quire.ops.native.program import StepData
from quire.ops.native.structs import TYPE_OF
from quire.ops.table import OPERATIONS

# Columns of activations -> arguments: how many activations an operation takes, then the rest, tensors and numbers.
Arguments = Callable[[int, torch.dtype], tuple[int, list[Any]]]


def vector(size: int, dtype: torch.dtype, seed: int = 7) -> Tensor:
    return at_page_end(draw(size, dtype=dtype, seed=seed))


SHAPES: dict[str, Arguments] = {
    "add": lambda n, t: (2, []),
    "add_rms_norm": lambda n, t: (2, [vector(n, t), 1e-5, True]),
    "gelu": lambda n, t: (1, []),
    "gelu_and_mul": lambda n, t: (1, []),
    "gelu_tanh": lambda n, t: (1, []),
    "gelu_tanh_and_mul": lambda n, t: (1, []),
    "layer_norm": lambda n, t: (1, [vector(n, t), vector(n, t, 8), 1e-5]),
    "linear": lambda n, t: (1, [draw(33, n, dtype=t, seed=9) * n**-0.5, vector(33, t)]),
    "relu": lambda n, t: (1, []),
    "relu2": lambda n, t: (1, []),
    "rms_norm": lambda n, t: (1, [vector(n, t), 1e-5, True]),
    "rms_norm_first": lambda n, t: (1, [vector(n // 2, t), 1e-5]),
    "scale": lambda n, t: (1, [-1.7]),
    "silu": lambda n, t: (1, []),
    "silu_and_mul": lambda n, t: (1, []),
    "swiglu_oai": lambda n, t: (1, []),
    "softcap": lambda n, t: (1, [1.5]),
}
IN_PLACE = {"rms_norm_first"}  # the result takes the place of what was computed before
OF_STEPS = {"embedding"}  # given ids, see below
OF_RANKS = {"gather", "gather_rows", "own_rows", "reduce"}  # tests/unit/distributed
OF_ADAPTERS = {"lora", "lora_rows"}  # test_native_lora.py
OF_EXPERTS = {"mixture"}  # test_native_experts.py
# Natively `prepare` and `attend` (tests/unit/attention), `linear` of packed weights, and torch (tests/unit/layers).
NOT_RECORDED = {
    "paged_attention",
    "quantized_linear",
    "gated_linear",
    "integer_linear",
    "rotary",
    "write_kv",
    "route",
    "mix",
}


def test_every_operation_has_shapes() -> None:
    assert OPERATIONS.keys() == SHAPES.keys() | OF_STEPS | OF_RANKS | OF_ADAPTERS | OF_EXPERTS | NOT_RECORDED
    assert {name for name, operation in OPERATIONS.items() if operation.build is None} == NOT_RECORDED
    assert all(getattr(ops, name) is operation for name, operation in OPERATIONS.items())


def close(found: Tensor, expected: Tensor) -> None:
    """Within the rounding of the type, a few times; sums in another order."""
    bound = 4 * EPSILON[found.dtype] * (1 + expected.double().abs()) + 1e-5
    assert found.dtype == expected.dtype
    assert ((found.double() - expected.double()).abs() <= bound).all()


@each({"size": [2, 6, 32, 100, 258], "name": SHAPES, "dtype": DTYPES})
def test_recorded_is_computed(level: str, dtype: torch.dtype, name: str, size: int) -> None:
    operation = OPERATIONS[name]
    count, others = SHAPES[name](size, dtype)
    inputs = [draw(37, size, dtype=dtype, seed=i) for i in range(count)]
    expected = operation(*inputs, *others)
    builder = ProgramBuilder(dtype)
    if name == "linear":
        others[0] = packed(others[0], TYPE_OF[dtype])
    given: list[Any] = [builder.input(size) for _ in inputs]
    recorded = operation(*(ops.scale(x, 1.0) if name in IN_PLACE else x for x in given), *others)
    results, values = ([x] if not isinstance(x, tuple) else list(x) for x in (expected, recorded))
    outputs = [torch.full_like(x, torch.nan) for x in results]
    builder.finish(values).run([*map(at_page_end, inputs), *outputs])
    for found, result in zip(outputs, results, strict=True):
        close(found, result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(level: str, dtype: torch.dtype) -> None:
    table, ids = draw(20, 40, dtype=dtype), torch.tensor([19, 0, 7])
    builder = ProgramBuilder(dtype)
    index: Any = builder.ids
    value: Any = ops.embedding(index, packed(table, TYPE_OF[dtype]))
    one = torch.tensor([3])
    step = StepData(ids, ids, AttentionBatch(torch.tensor([0, 3]), one, one[None], slot_mapping=ids, block_size=16))
    assert torch.equal(run(builder.finish(value), [], 40, dtype, step), ops.embedding(ids, table))
