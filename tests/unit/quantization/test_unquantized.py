"""The default weight format."""

import torch

from quire.quantization.base import MatrixShape, TensorForm, Unquantized


def test_parts_are_loaded_side_by_side_and_cast() -> None:
    method, shape = Unquantized(), MatrixShape(3, 6, bias=True)
    weights = method.create_weights(shape, torch.bfloat16)
    assert {name: (w.shape, w.dtype) for name, w in weights.items()} == {
        "weight": ((6, 3), torch.bfloat16),
        "bias": ((6,), torch.bfloat16),
    }
    assert method.checkpoint_tensors(MatrixShape(3, 4)) == {"weight": TensorForm((4, 3))}
    assert method.checkpoint_tensors(MatrixShape(3, 4, bias=True)).keys() == {"weight", "bias"}
    whole, bias = torch.arange(18.0).view(6, 3), torch.arange(6.0)
    method.load(weights, shape, whole[4:], 4)
    method.load(weights, shape, whole[:4], 0)
    weights["bias"].copy_(bias)
    assert torch.equal(weights["weight"], whole.bfloat16())
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert torch.equal(method.apply(weights, shape, x), (whole.sum(1) + bias).bfloat16().expand(2, 6))
    ids = torch.tensor([5, 0, 5])
    assert torch.equal(method.lookup(weights, shape, ids, torch.bfloat16), whole.bfloat16()[ids])
    del weights["bias"]
    assert torch.equal(method.apply(weights, MatrixShape(3, 6), x), whole.sum(1).bfloat16().expand(2, 6))
