"""Mixtures of experts: which experts a token gets, what it gets from them, and that no other token has a say in it."""

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.attention.step import Step
from quire.layers.linear import Linear, Place
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts, Routing
from quire.ops.native.builder import ProgramBuilder
from quire.ops.native.library import TORCH, levels
from quire.quantization.base import QuantizationMethod, Unquantized
from quire.quantization.packed import Packed, Packing

SIZE, INNER, EXPERTS = 32, 48, 5


def zeros(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def mixture(method: QuantizationMethod, dtype: torch.dtype, routing: Routing, *, shared: bool) -> MixtureOfExperts:
    generator = torch.Generator().manual_seed(1)
    place = Place("", method, dtype)

    def linear(inputs: int, outputs: int) -> Linear:
        layer = Linear(place, inputs, outputs)
        [slot] = layer.checkpoint_slots("")
        slot.load((torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype))
        return layer

    def mlp() -> GatedMLP:
        return GatedMLP(linear(SIZE, 2 * INNER), linear(INNER, SIZE), "silu")

    gate, experts = linear(SIZE, EXPERTS), [mlp() for _ in range(EXPERTS)]
    if not shared:
        return MixtureOfExperts(routing, gate, experts)
    return MixtureOfExperts(routing, gate, experts, (mlp(), linear(SIZE, 1)))


def test_the_first_of_equals_is_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 0.0, 4.0]])
    weights, experts = ops.route(scores, Routing(4, 2, True))
    assert experts.tolist() == [[1, 2], [0, 1], [3, 0]]
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))
    weights, _ = ops.route(scores, Routing(4, 2, False))
    torch.testing.assert_close(weights, scores.softmax(-1).gather(1, experts))


def test_a_bias_chooses_and_does_not_weigh() -> None:
    scores, bias = torch.tensor([[0.0, 2.0, 1.0, -1.0]]), torch.tensor([0.0, -1.0, 0.0, 0.9])
    for by_sigmoid, expected in ((True, scores.sigmoid()), (False, scores.softmax(-1))):
        weights, experts = ops.route(scores, Routing(4, 2, False, by_sigmoid, 2.5, bias))
        assert experts.tolist() == [[3, 2]]
        torch.testing.assert_close(weights, 2.5 * expected.gather(1, experts))
    weights, _ = ops.route(scores - 1000, Routing(4, 2, True, by_sigmoid=True))
    assert weights.tolist() == [[0.0, 0.0]], "all are 0, and none is NaN"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_a_token_gets_the_weighted_sum_of_its_experts(shared: bool, renormalize: bool) -> None:
    moe = mixture(Unquantized(), torch.float32, Routing(EXPERTS, 2, renormalize), shared=shared)
    x = torch.randn(40, SIZE, generator=torch.Generator().manual_seed(2))
    found = moe(x, Step(torch.arange(40)))
    shares = moe.gate(x).softmax(-1)
    for row, share, out in zip(x, shares, found, strict=True):
        weights, experts = share.topk(2)
        if renormalize:
            weights = weights / weights.sum()
        one, step = row[None], Step(torch.arange(1))
        expected = sum(w * moe.experts[int(e)](one, step)[0] for w, e in zip(weights, experts, strict=True))
        if moe.shared_expert is not None and moe.shared_expert_gate is not None:
            expected = expected + moe.shared_expert_gate(one)[0].sigmoid() * moe.shared_expert(one, step)[0]
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "packed", "int8", "int4", "w8a8", "w4a8"])
def test_no_token_has_a_say_in_anothers(kind: str, dtype: torch.dtype) -> None:
    if kind != "plain" and levels() == [TORCH]:
        pytest.skip("needs the compiled kernels")
    method = Unquantized() if kind == "plain" else Packed(kind if kind != "packed" else None, Packing(dtype, zeros))
    moe = mixture(method, dtype, Routing(EXPERTS, 2, True), shared=True)
    x = torch.randn(90, SIZE, generator=torch.Generator().manual_seed(2)).to(dtype)

    def run(rows: Tensor) -> Tensor:
        if kind == "plain":
            return moe(rows, Step(torch.arange(len(rows))))
        out = torch.empty_like(rows)
        program.run([rows, out])
        return out

    if kind != "plain":
        builder = ProgramBuilder(dtype)
        value: object = moe(builder.input(SIZE), Step(builder.positions))  # type: ignore[arg-type]
        program = builder.finish(value)  # type: ignore[arg-type]
        plain = mixture(Unquantized(), dtype, Routing(EXPERTS, 2, True), shared=True)
        errors = (run(x).float() - plain(x, Step(torch.arange(90))).float()).abs().amax(-1)
        assert errors.median() < {"packed": 0.02, "int8": 0.05, "w8a8": 0.1, "int4": 0.6, "w4a8": 0.6}[kind]
    together = run(x)
    for start, stop in ((0, 1), (5, 6), (7, 40), (40, 90)):
        assert torch.equal(run(x[start:stop].clone()), together[start:stop])
