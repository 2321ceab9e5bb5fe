"""The feed-forward blocks: gated (Llama and most) and plain (GPT-2, OPT)."""

from collections.abc import Callable

from torch import Tensor, nn

from quire import ops
from quire.attention.step import Step
from quire.errors import ModelLoadError
from quire.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": ops.relu,
    "gelu": ops.gelu,
    "gelu_new": ops.gelu_tanh,
    "gelu_fast": ops.gelu_tanh,
    "gelu_pytorch_tanh": ops.gelu_tanh,
}
GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_new": ops.gelu_tanh_and_mul,
    "gelu_fast": ops.gelu_tanh_and_mul,
    "gelu_pytorch_tanh": ops.gelu_tanh_and_mul,
}


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` (arXiv:2002.05202).

    Args:
        gate_up_proj: H -> 2 I, the gate first.
    """

    def __init__(self, gate_up_proj: Linear, down_proj: Linear, activation: str) -> None:
        super().__init__()
        self.activation = _known(activation, GATED_ACTIVATIONS, " in a gated MLP")
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def forward(self, x: Tensor, step: Step | None) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x, step)), step)


class MLP(nn.Module):
    """``fc2(activation(fc1(x)))``."""

    def __init__(self, fc1: Linear, fc2: Linear, activation: str) -> None:
        super().__init__()
        self.activation = _known(activation, ACTIVATIONS)
        self.fc1 = fc1
        self.fc2 = fc2

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.fc2(self.activation(self.fc1(x, step)), step)


def _known(name: str, table: dict[str, Callable[[Tensor], Tensor]], where: str = "") -> Callable[[Tensor], Tensor]:
    if name not in table:
        raise ModelLoadError(f"activation function {name!r} is not supported{where}; supported are {', '.join(table)}.")
    return table[name]
