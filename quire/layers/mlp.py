"""The feed-forward blocks: gated (Llama and most) and plain (GPT-2, OPT, StarCoder2, Arcee)."""

from torch import Tensor, nn

from quire import ops
from quire.attention.step import Step
from quire.errors import ModelLoadError
from quire.layers.linear import Linear
from quire.ops.activation import Activation

# By name: plain, and as the gate of a gated MLP; None where no model has it so.
ACTIVATIONS: dict[str, tuple[Activation | None, Activation | None]] = {
    "relu": (ops.relu, None),
    "relu2": (ops.relu2, None),
    "silu": (None, ops.silu_and_mul),
    "swiglu_oai": (None, ops.swiglu_oai),
    "gelu": (ops.gelu, ops.gelu_and_mul),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), (ops.gelu_tanh, ops.gelu_tanh_and_mul)),
}


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` (arXiv:2002.05202).

    Args:
        gate_up_proj: H -> 2 I, the gate first.
    """

    def __init__(self, gate_up_proj: Linear, down_proj: Linear, activation: str) -> None:
        super().__init__()
        self.activation = _known(activation, gated=True)
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x: Tensor, step: Step | None) -> Tensor:
        return self.down_proj(self.gate_up_proj(x, step, gate=self.activation), step)


class MLP(nn.Module):
    """``fc2(activation(fc1(x)))``."""

    def __init__(self, fc1: Linear, fc2: Linear, activation: str) -> None:
        super().__init__()
        self.activation = _known(activation, gated=False)
        self.fc1, self.fc2 = fc1, fc2

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.fc2(self.activation(self.fc1(x, step)), step)


def _known(name: str, *, gated: bool) -> Activation:
    known = {each: forms[gated] for each, forms in ACTIVATIONS.items()}
    if (found := known.get(name)) is None:
        where, names = " in a gated MLP" * gated, ", ".join(each for each, form in known.items() if form is not None)
        raise ModelLoadError(f"activation function {name!r} is not supported{where}; supported are {names}.")
    return found
