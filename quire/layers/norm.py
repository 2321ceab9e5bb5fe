"""RMSNorm and LayerNorm over the hidden dimension, alone or fused with the addition to the residual stream."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire import ops
from quire.quantization.base import CheckpointSlot, TensorForm


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``, or where `plus_one` ``* (1 + weight)``."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps
        self.plus_one = plus_one

    def checkpoint_slots(self, path: str) -> Iterator[CheckpointSlot]:
        """The place of its tensor; `path` is where the module stands."""
        return _vectors(self, path)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.plus_one)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum; without a residual, of `x` itself."""
        if residual is None:
            return self(x), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps, self.plus_one)


class LayerNorm(nn.Module):
    """``(x - mean(x)) / std(x) * weight + bias``; neither weight nor bias where not `affine`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, affine: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if affine else None
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if affine else None
        self.eps = eps

    def checkpoint_slots(self, path: str) -> Iterator[CheckpointSlot]:
        """The place of each of its tensors; `path` is where the module stands."""
        return _vectors(self, path)

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum; without a residual, of `x` itself."""
        if residual is None:
            return self(x), x
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


def _vectors(module: nn.Module, path: str) -> Iterator[CheckpointSlot]:
    for name, parameter in module.named_parameters(recurse=False):
        yield CheckpointSlot(f"{path}.{name}", TensorForm(tuple(parameter.shape)), parameter.copy_)


Norm = RMSNorm | LayerNorm
