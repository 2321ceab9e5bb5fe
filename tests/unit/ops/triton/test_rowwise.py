"""Norms, activations and lookups: each kernel against its reference, and each row a function of that row alone."""

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops.table import OPERATIONS

DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # a rounding of each type
ACTIVATIONS = [
    "silu",
    "silu_and_mul",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "relu",
    "relu2",
    "swiglu_oai",
]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 40, 100, 1500])
@pytest.mark.parametrize("kind", ["rms", "plus_one", "add", "layer", "plain layer"])
def test_norms(installed: str, kind: str, size: int, dtype: torch.dtype) -> None:
    weight, bias = draw(size, dtype=dtype, seed=1).to(installed), draw(size, dtype=dtype, seed=2).to(installed)
    x, residual = (draw(67, size, dtype=dtype, seed=seed).to(installed) for seed in (3, 4))
    operation, arguments = {
        "rms": (ops.rms_norm, (x * 3, weight, 1e-6)),
        "plus_one": (ops.rms_norm, (x, weight, 1e-6, True)),
        "add": (ops.add_rms_norm, (x, residual, weight, 1e-5, False)),
        "layer": (ops.layer_norm, (x, weight, bias, 1e-5)),
        "plain layer": (ops.layer_norm, (x + 2, None, None, 1e-5)),
    }[kind]
    ours, theirs = operation(*arguments), operation.reference(*arguments)
    one, last = (
        tuple(each[part] if torch.is_tensor(each) and each.dim() == 2 else each for each in arguments)
        for part in (slice(0, 1), slice(66, 67))
    )
    for which, alone in ((slice(0, 1), operation(*one)), (slice(66, 67), operation(*last))):
        pairs = zip(alone, ours, strict=True) if kind == "add" else [(alone, ours)]
        assert all(torch.equal(row, whole[which]) for row, whole in pairs)
    if kind == "add":
        assert torch.equal(ours[1], theirs[1])
        ours, theirs = ours[0], theirs[0]
    assert_near(ours, theirs)


def test_norms_of_heads_that_lie_apart_and_of_nothing(installed: str) -> None:
    heads = draw(5, 7, 24).to(installed)[:, 2:5]
    weight = draw(24, seed=1).to(installed)
    assert_near(ops.rms_norm(heads, weight, 1e-6), ops.rms_norm.reference(heads, weight, 1e-6))
    assert ops.rms_norm(heads[:0], weight, 1e-6).shape == (0, 3, 24)
    tilted = draw(50).to(installed)[2:]  # not at a multiple of 16 bytes
    assert torch.equal(
        ops.rms_norm(tilted.view(2, 24), weight, 1e-6), ops.rms_norm(tilted.view(2, 24).clone(), weight, 1e-6)
    )


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 100, 2100])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(installed: str, name: str, size: int, dtype: torch.dtype) -> None:
    operation = OPERATIONS[name]
    x = (draw(5, size, dtype=dtype) * 4).to(installed)
    x[0, 0], x[1, 0], x[2, 0] = 300.0, -300.0, 0.0
    ours = operation(x)
    assert_near(ours, operation.reference(x))
    assert torch.equal(operation(x[3:4]), ours[3:4])
    assert torch.equal(
        operation(draw(5, size + 3, dtype=dtype).to(installed)[:, :size]),
        operation(draw(5, size + 3, dtype=dtype).to(installed)[:, :size].clone()),
    )
    assert operation(x[:0]).shape == (0, ours.shape[1])


def test_a_nan_stays_one(installed: str) -> None:
    x = torch.full((1, 4), torch.nan, device=installed)
    assert all(OPERATIONS[name](x).isnan().all() for name in ACTIVATIONS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_embedding(installed: str, index: torch.dtype, dtype: torch.dtype) -> None:
    table = draw(11, 1030, dtype=dtype).to(installed)
    ids = torch.tensor([3, 10, 0, 3], dtype=index, device=installed)
    assert torch.equal(ops.embedding(ids, table), table[ids.long()])
    assert torch.equal(ops.embedding(ids, table[:, 1:30]), table[ids.long(), 1:30])
    assert ops.embedding(ids[:0], table).shape == (0, 1030)
    beyond = torch.tensor([-1, 11, 2], dtype=index, device=installed)
    assert torch.equal(ops.embedding(beyond, table)[:, 0], torch.stack((table[0, 0] * 0, table[0, 0] * 0, table[2, 0])))
