"""The contract of a weight format: create the weights, load a checkpoint tensor into them, multiply with them.

A linear layer is given one when it is built and calls nothing else. A format knows one matrix at a time; it must not
know models, nor which layer it serves.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor


class QuantizationMethod(ABC):
    """How linear layers keep their weights. Holds no weights itself: one object serves every layer of a model."""

    @abstractmethod
    def create_weights(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The layer's parameters, by name, allocated and not yet filled."""

    @abstractmethod
    def checkpoint_shapes(self, in_features: int, out_features: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
        """What a checkpoint must hold for that many output features: tensor name -> shape."""

    @abstractmethod
    def load(self, weights: Mapping[str, Tensor], name: str, loaded: Tensor, start: int) -> None:
        """Put the checkpoint tensor `name` into the layer's output features from `start` on.

        A merged layer is loaded in parts, in any order; the shape has been checked against `checkpoint_shapes`.
        """

    @abstractmethod
    def apply(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """[M, in_features] -> [M, out_features], with the bias where there is one; a row depends on that row alone."""
