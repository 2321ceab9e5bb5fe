"""Mixtures of experts: the kernels against torch, one token at a time, and each token by itself."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.attention.step import Step
from quire.layers.linear import Linear, Place
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts, Routing
from quire.models.packings import Numbers
from quire.quantization.base import MatrixShape, QuantizationMethod, TensorForm, Unquantized
from quire.quantization.coded import Coded
from quire.quantization.grouped import KEPT

SIZES = (40, 24)  # of hidden states, and within an expert


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Kept(Coded):
    """Takes numbers, which it rounds to codes of its own."""

    def checkpoint_tensors(self, shape: MatrixShape) -> dict[str, TensorForm]:
        return Unquantized().checkpoint_tensors(shape)

    def load(self, weights: Mapping[str, Tensor], shape: MatrixShape, loaded: Tensor, start: int) -> None:
        codes = (loaded.float() * 20 + 7).round().clamp(0, 15).to(torch.uint8)
        scales = torch.full((len(codes), -(-codes.shape[1] // 32)), 0.05)
        blocks = Numbers(codes, scales, torch.full_like(scales, 7), 32).blocks(False, 32)
        super().load(weights, shape, blocks, start)


def mixture(
    method: QuantizationMethod,
    dtype: torch.dtype,
    count: int,
    device: str,
    sizes: tuple[int, int] = SIZES,
    activation: str = "silu",
) -> MixtureOfExperts:
    """With biases, as gpt-oss has them, where the activation is its own."""
    size, inner = sizes

    def linear(inputs: int, outputs: int, seed: int, method: QuantizationMethod = method) -> Linear:
        layer = Linear(Place("", method, dtype), inputs, outputs, bias=activation != "silu")
        matrix, *bias = layer.checkpoint_slots("")
        matrix.load((draw(outputs, inputs, seed=seed) / inputs**0.5).to(dtype))
        for slot in bias:
            slot.load(draw(outputs, seed=seed + 200).to(dtype))
        return layer

    mlps = [GatedMLP(linear(size, 2 * inner, 2 * i), linear(inner, size, 2 * i + 1), activation) for i in range(count)]
    return MixtureOfExperts(Routing(count, 2, True), linear(size, count, 99, Unquantized()), mlps).to(device)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("by_sigmoid", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("count", [4, 60])
def test_route(installed: str, count: int, renormalize: bool, by_sigmoid: bool, biased: bool) -> None:
    scores = (draw(9, count) * 2).to(torch.bfloat16).to(installed)
    bias = draw(count, seed=3).to(installed) if biased else None
    routing = Routing(count, 3, renormalize, by_sigmoid, 2.5 if by_sigmoid else 1.0, bias)
    weights, chosen = ops.route(scores, routing)
    expected, experts = ops.route.reference(scores, routing)
    experts, order = experts.sort()
    assert torch.equal(chosen.long(), experts)
    torch.testing.assert_close(weights, expected.gather(1, order), rtol=1e-5, atol=1e-6)
    equal, routing = torch.zeros(1, count, device=installed), replace(routing, bias=None)
    assert ops.route(equal, routing)[1].tolist() == [[0, 1, 2]]
    equal[0, :] = torch.nan
    weights, chosen = ops.route(equal, routing)
    assert weights.isnan().all()
    assert chosen.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [
        (None, torch.float32, 3),
        pytest.param("U4_32", torch.bfloat16, 3, marks=pytest.mark.slow),
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
    method = Unquantized() if kind is None else Kept(kind) if kind in KEPT else Coded(kind)
    sizes = (64, 32) if kind in KEPT else SIZES
    moe = mixture(method, dtype, count, installed, sizes, "swiglu_oai" if count == 3 else "silu")
    assert moe._all.weights is not None, "they are not multiplied together"
    x = draw(40, sizes[0], seed=5).to(dtype).to(installed)

    def run(rows: Tensor) -> Tensor:
        return moe(rows, Step(torch.arange(len(rows))))

    whole = run(x)
    for start, stop in ((0, 1), (1, 3), (20, 40)):
        assert torch.equal(run(x[start:stop]), whole[start:stop])
    weights, chosen = ops.route(moe.gate(x), moe.routing)
    expected = ops.mix.reference(x, weights, chosen.long(), moe._all)  # of the same products, by kernels
    rounding = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(whole.float(), expected, rtol=rounding, atol=rounding)
    assert run(x[:0]).shape == (0, sizes[0])


def test_experts_of_several_types_are_not_multiplied_together() -> None:
    plain, made = (mixture(method, torch.float32, 2, "cpu").experts for method in (Unquantized(), Coded("int8")))
    gate = Linear(Place("", Unquantized(), torch.float32), SIZES[0], 2)
    mixed: list[Any] = [plain[0], made[1]]
    assert MixtureOfExperts(Routing(2, 1, True), gate, mixed)._all.weights is None
