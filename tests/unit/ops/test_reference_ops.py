"""The plain-torch operations: right against torch in fp64, and each row a function of that row alone."""

import pytest
import torch
import torch.nn.functional as F
from native_cases import swiglu_oai
from sweeping import each
from torch import Tensor

from quire import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SIZES = [2, 40, 100, 128, 1000]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rowwise(name: str, size: int, dtype: torch.dtype):
    """(our operation of x [M, size], the same in fp64 by torch)."""
    weight, bias = draw(size, dtype=dtype, seed=1), draw(size, dtype=dtype, seed=2)
    matrix = (draw(33, size, seed=3) / size**0.5).to(dtype)
    angles = draw(100, size)
    positions = torch.arange(100)

    def rms(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

    def rotated(x: Tensor) -> Tensor:
        cos, sin = angles[: len(x)].double().chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def rotary(x: Tensor) -> Tensor:
        query, key = ops.rotary(x[:, None], x[:, None].repeat(1, 3, 1), positions[: len(x)], angles)
        assert torch.equal(key, query.expand_as(key))
        return query[:, 0]

    return {
        "linear": (lambda x: ops.linear(x, matrix), lambda x: x @ matrix.double().t()),
        "linear with bias": (
            lambda x: ops.linear(x, matrix, bias[:1].expand(33)),
            lambda x: x @ matrix.double().t() + bias[0].double(),
        ),
        "rms_norm": (lambda x: ops.rms_norm(x, weight, 1e-6), rms),
        "layer_norm": (
            lambda x: ops.layer_norm(x, weight, bias, 1e-5),
            lambda x: F.layer_norm(x, (size,), weight.double(), bias.double(), 1e-5),
        ),
        "silu_and_mul": (ops.silu_and_mul, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
        "swiglu_oai": (ops.swiglu_oai, lambda x: swiglu_oai(*x.chunk(2, -1))),
        "silu": (ops.silu, F.silu),
        "gelu": (ops.gelu, F.gelu),
        "gelu_tanh": (ops.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
        "relu": (ops.relu, F.relu),
        "relu2": (ops.relu2, lambda x: F.relu(x).square()),
        "rotary": (rotary, rotated),
    }[name]


NAMES = [
    "linear",
    "linear with bias",
    "rms_norm",
    "layer_norm",
    "silu_and_mul",
    "swiglu_oai",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "rotary",
]
POSITION_DEPENDENT = ("rotary",)


@each({"name": NAMES, "dtype": DTYPES, "size": SIZES})
def test_values_and_independence_of_rows(name: str, dtype: torch.dtype, size: int) -> None:
    ours, theirs = rowwise(name, size, dtype)
    x = draw(70, size, dtype=dtype, seed=5) * 3
    whole = ours(x)
    assert whole.dtype == dtype
    torch.testing.assert_close(whole.double(), theirs(x.double()), atol=5 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    # Slices begin at odd addresses, and have from 1 to 66 rows.
    for start, stop in ((0, 1), (3, 4), (5, 7), (1, 34), (13, 45), (4, 70), (69, 70)):
        first = 0 if name in POSITION_DEPENDENT else start
        assert torch.equal(ours(x[first:stop]), whole[first:stop]), (start, stop)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [1024, 3072])
def test_linear_rows_do_not_depend_on_their_place_or_company(dtype: torch.dtype, features: int) -> None:
    """Long sums, where a GEMM would change its order with the number of rows."""
    weight, x = draw(192, features, dtype=dtype), draw(100, features, dtype=dtype, seed=1)
    whole = ops.linear(x, weight)
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(2))
    assert torch.equal(ops.linear(x[shuffled], weight), whole[shuffled])
    for row in (0, 31, 32, 99):
        assert torch.equal(ops.linear(x[row : row + 1], weight)[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 11, 17])
@pytest.mark.parametrize("features", [10, 33])
def test_linear_of_few_columns_knows_no_place(dtype: torch.dtype, columns: int, features: int) -> None:
    """Where the remainder of a tile's rows has kernels of its own in some libraries."""
    weight, x = draw(columns, features, dtype=dtype), draw(32, features, dtype=dtype, seed=1)
    whole = ops.linear(x, weight)
    for shift in (1, 3, 8, 17):
        assert torch.equal(ops.linear(x.roll(shift, 0), weight), whole.roll(shift, 0))


def test_linear_of_nothing() -> None:
    assert ops.linear(torch.empty(0, 8), torch.ones(5, 8), torch.ones(5)).shape == (0, 5)


def test_linear_takes_strided_input() -> None:
    x, weight = draw(9, 20), draw(7, 10)
    assert torch.equal(ops.linear(x[:, ::2], weight), ops.linear(x[:, ::2].contiguous(), weight))


def test_silu_of_large_numbers_is_finite() -> None:
    x = torch.tensor([[-1e4, 1e4, 2.0, 2.0]])
    assert ops.silu_and_mul(x).tolist() == [[0.0, 2e4]]


def test_rotary_leaves_the_rest_of_a_partly_rotated_head() -> None:
    x = draw(4, 2, 10)
    angles = torch.cat((torch.zeros(4, 3), torch.ones(4, 3)), -1)  # a quarter turn
    query, key = ops.rotary(x, x[:, :1], torch.arange(4), angles)
    assert torch.equal(query, torch.cat((-x[..., 3:6], x[..., :3], x[..., 6:]), -1))
    assert torch.equal(key, query[:, :1])


def test_rotary_takes_angles_by_position() -> None:
    x, angles = draw(3, 2, 8), draw(50, 8)
    positions = torch.tensor([49, 0, 7])
    query, _ = ops.rotary(x, x, positions, angles)
    for i, position in enumerate(positions.tolist()):
        alone, _ = ops.rotary(x[i : i + 1], x[i : i + 1], torch.tensor([position]), angles)
        assert torch.equal(alone[0], query[i])


def test_write_kv_puts_tokens_in_their_slots_and_nothing_else() -> None:
    cache = torch.full((3, 4, 2, 2, 5), torch.nan)
    key, value = draw(3, 2, 5), draw(3, 2, 5, seed=1)
    ops.write_kv(key, value, cache, torch.tensor([9, 0, 3]))
    for token, (block, offset) in enumerate([(2, 1), (0, 0), (0, 3)]):
        assert torch.equal(cache[block, offset, 0], key[token])
        assert torch.equal(cache[block, offset, 1], value[token])
    assert cache.isnan().sum() == cache.numel() - key.numel() - value.numel()


def test_embedding() -> None:
    table = draw(6, 3)
    assert torch.equal(ops.embedding(torch.tensor([5, 0, 5]), table), table[[5, 0, 5]])
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([6]), table)
