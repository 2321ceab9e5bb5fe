"""Token and position embeddings, and the output head that shares the token embedding's weights.

An embedding is a matrix with a row for each index, kept by a weight format as a linear layer's is.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from quire.layers.step import Step
from quire.quantization.base import MatrixShape, QuantizationMethod


class Embedding(nn.Module):
    """Indices [T] -> [T, size]."""

    def __init__(self, num_rows: int, size: int, method: QuantizationMethod, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = MatrixShape(size, num_rows)
        self.method = method
        self.dtype = dtype
        for name, weight in method.create_weights(self.shape, dtype).items():
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The parameters by name, as the weight format made them."""
        return cast(Mapping[str, Tensor], self._parameters)

    def forward(self, ids: Tensor, step: Step | None = None) -> Tensor:
        return self.method.lookup(self.weights, self.shape, ids, self.dtype)

    def load(self, name: str, loaded: Tensor) -> None:
        """Take the checkpoint tensor `name` ("weight")."""
        self.method.load(self.weights, self.shape, name, loaded, 0)


class VocabEmbedding(Embedding):
    """Token ids [T] -> [T, H]."""


class LearnedPositions(Embedding):
    """Positions [T] -> [T, H]; the vector of position p is row p + offset (OPT keeps two rows before the first)."""

    def __init__(
        self, num_positions: int, size: int, method: QuantizationMethod, dtype: torch.dtype, offset: int = 0
    ) -> None:
        super().__init__(num_positions + offset, size, method, dtype)
        self.offset = offset

    def forward(self, ids: Tensor, step: Step | None = None) -> Tensor:
        return super().forward(ids + self.offset if self.offset else ids, step)


class TiedHead(nn.Module):
    """Hidden states [R, H] -> logits [R, V], with the weights of the token embedding (not a copy of them)."""

    def __init__(self, embedding: VocabEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: Tensor, step: Step | None = None, *, wide: bool = False) -> Tensor:
        embedding = self.embedding
        return embedding.method.apply(embedding.weights, embedding.shape, hidden, wide=wide)
