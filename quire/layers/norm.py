"""RMSNorm and LayerNorm over the hidden dimension, alone or after the addition to the residual stream."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire import ops
from quire.quantization.base import CheckpointSlot, TensorForm


class Norm(nn.Module):
    """A norm, whose parameters are vectors."""

    def checkpoint_slots(self, path: str) -> Iterator[CheckpointSlot]:
        """The place of each of its tensors; `path` is where the module stands."""
        for name, parameter in self.named_parameters(recurse=False):
            yield CheckpointSlot(f"{path}.{name}", TensorForm(tuple(parameter.shape)), parameter.copy_)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum; without a residual, of `x` itself."""
        total = x if residual is None else ops.add(x, residual)
        return self(total), total


class RMSNorm(Norm):
    """``x / rms(x) * weight``, or where `plus_one` ``* (1 + weight)``."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.plus_one)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return super().add(x, residual)
        return ops.add_rms_norm(x, residual, self.weight, self.eps, self.plus_one)


class LayerNorm(Norm):
    """``(x - mean(x)) / std(x) * weight + bias``; neither weight nor bias where not `affine`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, affine: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if affine else None
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if affine and bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)
