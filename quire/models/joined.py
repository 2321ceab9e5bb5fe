"""A linear layer on several inputs side by side, without laying them side by side.

`quire.models.builder` makes it for EAGLE heads, which read a token's embedding together with hidden states.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from quire.attention.step import Step
from quire.layers.linear import Linear
from quire.quantization.base import CheckpointSlot, TensorForm


class JoinedLinear(nn.Module):
    """A linear layer on several inputs side by side, of one matrix in the checkpoint: the sum of a product of each.

    Args:
        pieces: one for each input, in order; the first alone may have a bias.
    """

    def __init__(self, pieces: Sequence[Linear]) -> None:
        super().__init__()
        self.pieces = tuple(pieces)  # not modules of their own: they are no tensors of a checkpoint

    def checkpoint_slots(self, path: str) -> Iterator[CheckpointSlot]:
        """The place of each of its tensors; `path` is where the module stands."""
        slots: dict[str, list[CheckpointSlot]] = {}
        for piece in self.pieces:
            for slot in piece.checkpoint_slots(path):
                slots.setdefault(slot.name, []).append(slot)
        for name, parts in slots.items():
            first = parts[0]
            if len(parts) == 1:
                yield first
                continue
            widths = [part.form.shape[1] for part in parts]
            form = TensorForm((first.form.shape[0], sum(widths)), first.form.dtypes)
            yield CheckpointSlot(name, form, partial(_load_side_by_side, parts, widths), first.filled)

    def forward(self, inputs: Sequence[Tensor], step: Step | None = None) -> Tensor:
        """[T, in_features] of each piece -> [T, out_features]."""
        (first, x), *others = zip(self.pieces, inputs, strict=True)
        total = first(x, step)
        for piece, x in others:
            total = piece(x, step) + total
        return total


def _load_side_by_side(parts: Sequence[CheckpointSlot], widths: Sequence[int], loaded: Tensor) -> None:
    for part, columns in zip(parts, loaded.split(list(widths), 1), strict=True):
        part.load(columns)
