"""Products at the sizes of real models on a GPU: right, and the same bits for a row however many there are.

The interpreter can't show this: which instructions a tile compiles to, and how they sum, is the device's.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.attention.step import Step
from quire.layers.linear import Linear, Place
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts, Routing
from quire.ops.grouped import expand, pack_int4
from quire.quantization.base import Unquantized
from quire.quantization.coded import Coded
from quire.quantization.grouped import KEPT
from tests.kernels import uninstall

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

SHAPES = [(6144, 4096), (4096, 14336), (28672, 4096), (4096, 1024), (1024, 3072), (151936, 1024), (8, 4096), (100, 72)]
NUM_ALL = 2048
NUM_ROWS = [1, 16, 17, 33, 64, 65, 129, 300, 700, 1000]  # with NUM_ALL each kind of tile that these shapes have
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}


@pytest.fixture(autouse=True)
def _installed():
    from quire.ops.triton import install

    install("cuda")
    with torch.inference_mode():
        yield
    uninstall()


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize(("num_columns", "size"), SHAPES)
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "int8", "int4", "fp8"])
def test_a_row_is_the_same_among_any_number(kind: str, num_columns: int, size: int) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    is_coded = kind in ("int8", "int4", "fp8")
    dtype = torch.bfloat16 if is_coded else getattr(torch, kind)
    dense = draw(num_columns, size, dtype=dtype, seed=1) * size**-0.5
    x, bias = draw(NUM_ALL, size, dtype=dtype, seed=2), draw(num_columns, dtype=dtype, seed=3)
    columns = torch.arange(0, num_columns, max(1, num_columns // 1000), device="cuda")  # all over
    if is_coded:
        with torch.device("cuda"):
            run = Linear(Place("", Coded(kind), dtype), size, num_columns, bias=True)
        for slot, loaded in zip(run.checkpoint_slots(""), (dense, bias), strict=True):
            slot.load(loaded)
        widened = torch.bfloat16 if kind == "int4" else torch.float32  # as it is multiplied
        dense = run.method.lookup(run.weights, run.shape, columns, widened)
    else:
        run = partial(ops.linear, weight=dense, bias=bias)
        dense = dense[columns]

    whole = run(x)
    for num_rows in NUM_ROWS:
        start = (num_rows * 37) % (NUM_ALL - num_rows)
        assert torch.equal(run(x[start : start + num_rows]), whole[start : start + num_rows]), num_rows
    exact = x[:64].double() @ dense.double().t() + bias[columns].double()
    error = (whole[:64, columns].double() - exact).abs()
    assert (error <= ROUNDING[dtype] * exact.abs() + bound_of_sums(size)).all(), float(error.max())


def bound_of_sums(size: int) -> float:
    """How far sums of so many products may be off, if the sums themselves are about 1.

    Tensor cores add 16 products at a time to the sum that there is, in fp32 but cut off, not rounded: errors have one
    sign, and add up to a unit in the last place, 2**-23 of the sum or twice that where it passes 2, with each addition.
    """
    return 2e-5 + size / 16 * 2**-22


@pytest.mark.parametrize(("num_columns", "size"), [(6144, 4096), (4096, 14336), (1024, 3072), (100, 96)])
@pytest.mark.parametrize("kind", KEPT)
def test_codes_of_a_checkpoint_are_multiplied_like_numbers(kind: str, num_columns: int, size: int) -> None:
    """To the last bit, by one row as by many."""
    generator = torch.Generator("cuda").manual_seed(1)
    groups = (num_columns, -(-size // int(kind[3:])))
    scales, x = draw(*groups, dtype=torch.float32, seed=1) * 0.01, draw(NUM_ALL, size, dtype=torch.bfloat16, seed=2)
    codes = torch.randint(120, (num_columns, size), generator=generator, device="cuda").to(torch.int8)
    zeros = torch.randint(16, groups, generator=generator, device="cuda").to(torch.int8)
    if kind.startswith("U4"):
        codes = pack_int4((codes & 15) - 8)
    elif kind.startswith("F8"):
        codes, zeros = codes.view(torch.float8_e4m3fn), torch.zeros_like(zeros)
    dense = expand(codes, scales, zeros, size).to(torch.bfloat16)
    whole = ops.quantized_linear(x, codes, scales, zeros=zeros)
    assert torch.equal(whole, ops.linear(x, dense))
    for num_rows in NUM_ROWS:
        assert torch.equal(ops.quantized_linear(x[:num_rows], codes, scales, zeros=zeros), whole[:num_rows])


@pytest.mark.parametrize(("num_columns", "size"), [(28672, 4096), (6144, 1024), (200, 72)])
@pytest.mark.parametrize("kind", [None, "int8", "int4", "U4_128"])
def test_a_gated_product_is_its_activation_of_the_product(kind: str | None, num_columns: int, size: int) -> None:
    """To the last bit, where one kernel makes both, and so for any number of rows."""
    with torch.device("cuda"):
        method = Unquantized() if kind is None else Coded(kind)
        layer = Linear(Place("", method, torch.bfloat16), size, num_columns, bias=True)
    for seed, weight in enumerate(layer.weights.values()):
        numbers = draw(*weight.shape, dtype=torch.float32, seed=seed)
        codes = not weight.is_floating_point()
        weight.copy_(numbers.mul(40).to(torch.int16) & 127 if codes else numbers * size**-0.5)
    x = draw(NUM_ALL, size, dtype=torch.bfloat16, seed=2)
    for gate in (ops.silu_and_mul, ops.gelu_tanh_and_mul, ops.gelu_and_mul):
        whole = gate(layer(x))
        assert not whole.isnan().any()
        for num_rows in (1, 2, 16, 17, 33, 64, 65, 300):
            assert torch.equal(layer(x[:num_rows], gate=gate), whole[:num_rows]), num_rows


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_a_token_gets_the_same_from_its_experts_among_any_number(kind: str | None) -> None:
    size, inner, count = 2048, 768, 64
    place = Place("", Unquantized() if kind is None else Coded(kind), torch.bfloat16)

    def linear(inputs: int, outputs: int, seed: int, place: Place = place) -> Linear:
        layer = Linear(place, inputs, outputs)
        [slot] = layer.checkpoint_slots("")
        slot.load(draw(outputs, inputs, dtype=torch.bfloat16, seed=seed) * inputs**-0.5)
        return layer

    with torch.device("cuda"):
        mlps = [GatedMLP(linear(size, 2 * inner, i), linear(inner, size, i + 99), "silu") for i in range(count)]
        gate = linear(size, count, 999, Place("", Unquantized(), torch.bfloat16))
        moe = MixtureOfExperts(Routing(count, 8, True), gate, mlps)
    x = draw(NUM_ALL, size, dtype=torch.bfloat16, seed=5)

    def run(start: int, count: int) -> Tensor:
        return moe(x[start : start + count], Step(torch.arange(count)))

    whole = run(0, NUM_ALL)
    for start, some in ((0, 1), (5, 2), (7, 17), (64, 64), (100, 300), (500, 1000)):
        assert torch.equal(run(start, some), whole[start : start + some]), some
    uninstall()
    plain = run(0, 32).float()
    assert (whole[:32].float() - plain).abs().max() < 0.05 * plain.std()


@pytest.mark.parametrize("width", [1024, 4096, 14336])
def test_other_rows_are_the_same_among_any_number(width: int) -> None:
    x, residual = (draw(2000, width, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    weight = draw(width, dtype=torch.bfloat16, seed=3)
    functions = {
        "rms_norm": lambda rows: ops.rms_norm(x[rows], weight, 1e-6),
        "add_rms_norm": lambda rows: torch.cat(ops.add_rms_norm(x[rows], residual[rows], weight, 1e-6), 1),
        "layer_norm": lambda rows: ops.layer_norm(x[rows], weight, weight, 1e-6),
        "silu_and_mul": lambda rows: ops.silu_and_mul(x[rows]),
        "softcap": lambda rows: ops.softcap(x[rows], 30.0),
        "route": lambda rows: torch.cat(ops.route(x[rows, :128].contiguous(), ops.Routing(128, 8, True)), 1),
    }
    for name, function in functions.items():
        whole = function(slice(None))
        for start, count in ((0, 1), (3, 1), (17, 16), (64, 65), (1, 999)):
            assert torch.equal(function(slice(start, start + count)), whole[start : start + count]), name
