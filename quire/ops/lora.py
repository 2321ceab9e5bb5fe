"""Low-rank additions to the rows of a product, or of a table: each by the matrices of its own adapter, or none.

Of a table an adapter may have other rows instead, at the first positions of a sequence: its virtual tokens.

A layer that adapters may change has a `LoraLayer`, with a place for each adapter that is in use. Recorded, it becomes
part of the product before it (csrc/lora.h). What an adapter is otherwise is not known here.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from quire.ops.linear import linear
from quire.ops.native.builder import Value
from quire.ops.native.structs import c_struct
from quire.ops.table import op

_BLOCK = 16  # features


class TokenSlots:
    """Which adapter each row of a run has, for the programs that were recorded with it."""

    def __init__(self) -> None:
        self.struct = c_struct("LoraRows")()
        self._slots: Tensor | None = None

    def set(self, slots: Tensor | None) -> None:
        """From now on these: int32 [rows], the adapter's place or -1; None where no row has one."""
        self._slots = slots
        self.struct.slots = None if slots is None else slots.data_ptr()


@dataclass(frozen=True)
class LoraMatrices:
    """What an adapter adds to some output features: ``scale * x @ a.T @ b.T``.

    Attributes:
        a: [rank, in_features]; of a table [its rows, rank].
        b: [features, rank].
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class VirtualRows:
    """What stands at the first positions of a sequence instead of what is computed there.

    Attributes:
        rows: [virtual tokens, width].
    """

    rows: Tensor


Adapted = LoraMatrices | VirtualRows
AdaptedRows = Sequence[tuple[int, Tensor]]  # the places in use, each with the rows of its adapter


class LoraLayer:
    """The adapters' matrices for one layer.

    Args:
        starts: where the features of each of its parts begin, and the end: [parts + 1].
        like: a tensor of the matrices' type, where they are to be.
        rows: for native programs; None where torch computes.
    """

    def __init__(
        self, starts: Sequence[int], num_slots: int, max_rank: int, like: Tensor, rows: TokenSlots | None
    ) -> None:
        self.starts, self._like = list(starts), like
        self._rows = rows
        self._held: list[Mapping[int, Adapted]] = [{}] * num_slots
        if rows is not None:
            num_parts = len(starts) - 1
            self._parts = (c_struct("LoraPart") * (num_slots * num_parts))()
            self.struct = c_struct("LoraLayer")(num_parts=num_parts, max_rank=max_rank)
            self.struct.rows, self.struct.parts = ctypes.addressof(rows.struct), ctypes.addressof(self._parts)

    def packed(self, part: int, own: LoraMatrices) -> LoraMatrices:
        """An adapter's matrices for a part as `put` wants them; this may take a while, and changes nothing."""
        a, b = own.a.to(self._like).contiguous(), own.b.to(self._like)
        if self._rows is not None:
            first, start = self.starts[part] // _BLOCK, self.starts[part]
            after = -self.starts[part + 1] % _BLOCK
            padded = F.pad(b, (0, 0, start - first * _BLOCK, after))
            b = padded.view(-1, _BLOCK, b.shape[1]).transpose(1, 2)
        return LoraMatrices(a, b.contiguous(), own.scale)

    def virtual(self, rows: Tensor) -> VirtualRows:
        """Virtual tokens' rows as `put` wants them."""
        return VirtualRows(rows.to(self._like).contiguous())

    def put(self, slot: int, packed: Mapping[int, Adapted]) -> None:
        """Let the adapter in this place be another one, or none ({})."""
        self._held[slot] = packed
        if self._rows is None:
            return
        num_parts = self.struct.num_parts
        for part in range(num_parts):
            entry, own = self._parts[slot * num_parts + part], packed.get(part)
            entry.rank = entry.first = entry.last = entry.num_virtual = 0
            if isinstance(own, VirtualRows):
                entry.a, entry.num_virtual = own.rows.data_ptr(), len(own.rows)
            elif own is not None:
                entry.rank = own.b.shape[1]
                entry.a, entry.b, entry.factor = own.a.data_ptr(), own.b.data_ptr(), own.scale
                entry.first = self.starts[part] // _BLOCK
                entry.last = entry.first + len(own.b)

    def at(self, slot: int) -> Mapping[int, Adapted]:
        """The matrices in a place, by part."""
        return self._held[slot]


@op
def lora(x: Tensor, y: Tensor, layer: LoraLayer, adapted: AdaptedRows) -> Tensor:
    """`y`, the product of `x`, with what adapters add: [T, K], [T, N] -> [T, N]; other rows as they are."""
    for slot, rows in adapted:
        added = y[rows].float()
        for part, own in layer.at(slot).items():
            assert isinstance(own, LoraMatrices), "virtual tokens are rows of a table"
            inner = linear(x[rows].float(), own.a.float()) * own.scale
            added[:, layer.starts[part] : layer.starts[part + 1]] += linear(inner, own.b.float())
        y = y.index_copy(0, rows, added.to(y.dtype))
    return y


@op
def lora_rows(ids: Tensor, y: Tensor, layer: LoraLayer, adapted: AdaptedRows, positions: Tensor) -> Tensor:
    """Likewise of `y`, the rows of a table by `ids`; virtual tokens are told by the positions, [T] integers."""
    for slot, rows in adapted:
        for own in layer.at(slot).values():
            if isinstance(own, VirtualRows):
                here = rows[positions[rows] < len(own.rows)]
                y = y.index_copy(0, here, own.rows[positions[here].long()].to(y.dtype))
                continue
            added = y[rows].float() + linear(own.a[ids[rows]].float() * own.scale, own.b.float())
            y = y.index_copy(0, rows, added.to(y.dtype))
    return y


@lora.native
@lora_rows.native
def _build(x: object, y: Value, layer: LoraLayer, adapted: AdaptedRows, positions: object = None) -> Value:
    return y.builder.tell(y, lora=y.builder.hold(layer, layer.struct))
