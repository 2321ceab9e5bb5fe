"""Token and position embeddings, and the output head that shares the token embedding's weights."""

import torch
from torch import Tensor, nn

from quire import ops


class VocabEmbedding(nn.Module):
    """Token ids [T] -> [T, H]."""

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size, dtype=dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.weight)


class LearnedPositions(nn.Module):
    """Positions [T] -> [T, H]; the vector of position p is row p + offset (OPT keeps two rows before the first)."""

    def __init__(self, num_positions: int, size: int, dtype: torch.dtype, offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions + offset, size, dtype=dtype), requires_grad=False)
        self.offset = offset

    def forward(self, positions: Tensor) -> Tensor:
        return ops.embedding(positions + self.offset if self.offset else positions, self.weight)


class TiedHead(nn.Module):
    """Hidden states [R, H] -> logits [R, V], with the weights of the token embedding (not a copy of them)."""

    def __init__(self, embedding: VocabEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: Tensor) -> Tensor:
        return ops.linear(hidden, self.embedding.weight)
