"""Token and position embeddings, and the output head that shares the token embedding's weights.

An embedding is a matrix with a row for each index, kept by a weight format as a linear layer's is.
"""

from torch import Tensor, nn

from quire import ops
from quire.attention.step import Step
from quire.layers.linear import Matrix, Place, adapted_rows


class Embedding(Matrix):
    """Indices [T] -> [T, size]."""

    def __init__(self, place: Place, num_rows: int, size: int) -> None:
        super().__init__(place, size, {"": num_rows})
        self.dtype = place.dtype

    def forward(self, ids: Tensor, step: Step | None = None) -> Tensor:
        rows = self.method.lookup(self.weights, self.shape, ids, self.dtype)
        if self.lora is None or step is None:
            return rows
        return ops.lora_rows(ids, rows, self.lora, adapted_rows(step), step.positions)


class VocabEmbedding(Embedding):
    """Token ids [T] -> [T, H]; of a group's ranks each has the rows of a range of ids."""

    def forward(self, ids: Tensor, step: Step | None = None) -> Tensor:
        if (shard := self.shard) is None or shard.outputs is None:
            return super().forward(ids, step)
        own = super().forward(ops.own_rows(ids, shard.group, shard.outputs), step)
        return ops.gather_rows(own, ids, shard.group, shard.outputs)


class LearnedPositions(Embedding):
    """Positions [T] -> [T, H]; the vector of position p is row p + offset (OPT keeps two rows before the first)."""

    def __init__(self, place: Place, num_positions: int, size: int, offset: int = 0) -> None:
        super().__init__(place, num_positions + offset, size)
        self.offset = offset

    def forward(self, ids: Tensor, step: Step | None = None) -> Tensor:
        return super().forward(ids + self.offset if self.offset else ids, step)


class TiedHead(nn.Module):
    """Hidden states [R, H] -> logits [R, V], with the weights of the token embedding (not a copy of them)."""

    def __init__(self, embedding: VocabEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.lora: ops.LoraLayer | None = None  # the embedding's own is another

    def forward(self, hidden: Tensor, step: Step | None = None, *, wide: bool = False) -> Tensor:
        return self.embedding.product(hidden, self.lora, step, wide)
