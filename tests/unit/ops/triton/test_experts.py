"""Mixtures of experts: the kernels against torch, one token at a time, and each token by itself."""

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.attention.step import Step
from quire.layers.linear import Linear, Place
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts, Routing
from quire.quantization.base import QuantizationMethod
from quire.quantization.unquantized import Unquantized
from quire.quantization.weight_only import WeightOnly

SIZE, INNER = 40, 24


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixture(method: QuantizationMethod, dtype: torch.dtype, count: int, device: str) -> MixtureOfExperts:
    def linear(inputs: int, outputs: int, seed: int, method: QuantizationMethod = method) -> Linear:
        layer = Linear(Place("", method, dtype), inputs, outputs)
        [slot] = layer.checkpoint_slots("")
        slot.load((draw(outputs, inputs, seed=seed) / inputs**0.5).to(dtype))
        return layer

    mlps = [GatedMLP(linear(SIZE, 2 * INNER, 2 * i), linear(INNER, SIZE, 2 * i + 1), "silu") for i in range(count)]
    return MixtureOfExperts(Routing(count, 2, True), linear(SIZE, count, 99, Unquantized()), mlps).to(device)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("count", [4, 60])
def test_route(installed: str, count: int, renormalize: bool) -> None:
    scores = (draw(9, count) * 2).to(torch.bfloat16).to(installed)
    weights, chosen = ops.route(scores, 3, renormalize)
    expected, experts = ops.route.reference(scores, 3, renormalize)
    experts, order = experts.sort()
    assert torch.equal(chosen.long(), experts)
    torch.testing.assert_close(weights, expected.gather(1, order), rtol=1e-5, atol=1e-6)
    equal = torch.zeros(1, count, device=installed)
    assert ops.route(equal, 3, renormalize)[1].tolist() == [[0, 1, 2]]
    equal[0, 2] = torch.nan
    weights, chosen = ops.route(equal, 3, renormalize)
    assert weights.isnan().all()
    assert chosen.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [
        (None, torch.float32, 3),
        pytest.param(None, torch.bfloat16, 17, marks=pytest.mark.slow),
        pytest.param("int8", torch.float16, 3, marks=pytest.mark.slow),
        pytest.param("int4", torch.bfloat16, 17, marks=pytest.mark.slow),
        pytest.param(None, torch.float32, 17, marks=pytest.mark.nightly),
        pytest.param(None, torch.bfloat16, 3, marks=pytest.mark.nightly),
        pytest.param("int8", torch.float16, 17, marks=pytest.mark.nightly),
        pytest.param("int4", torch.bfloat16, 3, marks=pytest.mark.nightly),
    ],
)
def test_mix(installed: str, kind: str | None, dtype: torch.dtype, count: int) -> None:
    moe = mixture(Unquantized() if kind is None else WeightOnly(kind), dtype, count, installed)
    x = draw(40, SIZE, seed=5).to(dtype).to(installed)

    def run(rows: Tensor) -> Tensor:
        return moe(rows, Step(torch.arange(len(rows))))

    whole = run(x)
    for start, stop in ((0, 1), (1, 3), (20, 40)):
        assert torch.equal(run(x[start:stop]), whole[start:stop])
    weights, chosen = ops.route(moe.gate(x), 2, True)
    expected = ops.mix.reference(x, weights, chosen.long(), moe._all)  # of the same products, by kernels
    rounding = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(whole.float(), expected, rtol=rounding, atol=rounding)
    assert run(x[:0]).shape == (0, SIZE)
