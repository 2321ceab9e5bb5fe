"""The feed-forward blocks: gated (Llama and its kin) and plain (GPT-2, OPT)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire import ops
from quire.errors import ModelLoadError
from quire.layers.linear import Linear
from quire.layers.step import Step
from quire.quantization.base import QuantizationMethod

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": ops.relu,
    "gelu": ops.gelu,
    "gelu_new": ops.gelu_tanh,
    "gelu_fast": ops.gelu_tanh,
    "gelu_pytorch_tanh": ops.gelu_tanh,
}


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202)."""

    def __init__(
        self, size: int, inner_size: int, *, activation: str, bias: bool, method: QuantizationMethod, dtype: torch.dtype
    ) -> None:
        super().__init__()
        if activation != "silu":
            raise ModelLoadError(f"hidden_act {activation!r} is not supported in a gated MLP; only 'silu' is.")
        parts = {"gate_proj": inner_size, "up_proj": inner_size}
        self.gate_up_proj = Linear(size, parts, bias=bias, method=method, dtype=dtype)
        self.down_proj = Linear(inner_size, size, bias=bias, method=method, dtype=dtype)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.down_proj(ops.silu_and_mul(self.gate_up_proj(x, step)), step)


class MLP(nn.Module):
    """``fc2(activation(fc1(x)))``."""

    def __init__(
        self, size: int, inner_size: int, *, activation: str, bias: bool, method: QuantizationMethod, dtype: torch.dtype
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ModelLoadError(
                f"activation function {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}."
            )
        self.activation = ACTIVATIONS[activation]
        self.fc1 = Linear(size, inner_size, bias=bias, method=method, dtype=dtype)
        self.fc2 = Linear(inner_size, size, bias=bias, method=method, dtype=dtype)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.fc2(self.activation(self.fc1(x, step)), step)
