"""A step as layers and attention backends see it: the one argument beside activations that every layer takes.

The model runner makes one a step; while a model is recorded its positions are recorded values and its lists are empty.
A layer reads what it needs and nothing is global. What a field means for a request or a scheduler is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class AdapterBatch:
    """Which adapter each token runs with.

    Attributes:
        slots: int32 [T] on the host, the adapter's place among those that are loaded; -1 for none.
        device: the model's.
    """

    slots: Tensor
    device: torch.device | None = None

    def of(self, rows: Sequence[int]) -> "AdapterBatch":
        """Those of some tokens."""
        return AdapterBatch(self.slots[list(rows)], self.device)

    @cached_property
    def rows(self) -> list[tuple[int, Tensor]]:
        """The places in use, each with the tokens of its adapter; every layer asks, and a device is told once."""
        places = sorted({*self.slots.tolist()} - {-1})
        return [(place, torch.nonzero(self.slots == place)[:, 0].to(self.device)) for place in places]


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
        taps: None where nobody wants hidden states.
        incoming: [T, H], what the layers of the stage before have made; None where there are none.
        outgoing: [T, H], where what the last layer makes is to be for the next stage; None where there is none.
        wanted: int32 [R] on the host, ascending: hidden states of other rows are of no use, and a model may leave them
            out; None where all are wanted.
    """

    positions: Tensor
    caches: Sequence[Tensor] = ()
    attention: Sequence[Any] = ()
    adapters: AdapterBatch | None = None
    taps: Taps | None = None
    incoming: Tensor | None = None
    outgoing: Tensor | None = None
    wanted: Tensor | None = None
