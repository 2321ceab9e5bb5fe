"""A step as layers and attention backends see it: the one argument beside activations that every layer takes.

The model runner makes one a step; while a model is recorded its positions are recorded values and its lists are empty.
A layer reads what it needs and nothing is global. What a field means for a request or a scheduler is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class AdapterBatch:
    """Which adapter each token runs with.

    Attributes:
        slots: int32 [T], the adapter's place among those that are loaded; -1 for none.
    """

    slots: Tensor

    def of(self, rows: Sequence[int]) -> "AdapterBatch":
        """Those of some tokens."""
        return AdapterBatch(self.slots[list(rows)])


@dataclass
class Taps:
    """Hidden states on their way through the layers, for whoever drafts tokens from them.

    Attributes:
        layers: indices of the layers whose output is wanted.
        hidden: [T, H] of each of them, in the order of the layers; filled by the model.
    """

    layers: Sequence[int]
    hidden: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """What a layer may know of a step of T tokens.

    Attributes:
        positions: int32 [T], of each token in its sequence.
        caches: the KV cache of each cache layer.
        attention: what the attention backend built, by KV group.
        adapters: None where no token has one.
        states: int32 [S], the slot of each sequence's recurrent state, where layers keep one.
        taps: None where nobody wants hidden states.
        incoming: [T, H], what the layers of the stage before have made; None where there are none.
        outgoing: [T, H], where what the last layer makes is to be for the next stage; None where there is none.
    """

    positions: Tensor
    caches: Sequence[Tensor] = ()
    attention: Sequence[Any] = ()
    adapters: AdapterBatch | None = None
    states: Tensor | None = None
    taps: Taps | None = None
    incoming: Tensor | None = None
    outgoing: Tensor | None = None
