"""Chooses the weight formats of a model. A device asks when one is to be built; a new format is one line here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from quire.ops.native.structs import Type
from quire.quantization.base import QuantizationMethod, Unquantized
from quire.quantization.coded import MADE, Coded
from quire.quantization.grouped import KEPT
from quire.quantization.packed import Packed, PackedParts, Packing

PACKED_AS_THEY_ARE = [type for type in Type if type is Type.W8A8 or type >= Type.Q4_0]  # blocks, of codes or integers


class TypesByLayer(Protocol):
    """Names of the types that a checkpoint's matrices have, by layer or part of one."""

    def get(self, layer: str, default: str, /) -> str: ...


@dataclass(frozen=True)
class WeightFormats:
    """The formats of a model's matrices.

    Attributes:
        linear: of linear layers.
        table: of embeddings and the output head.
        blocks: of a checkpoint whose tensors are in blocks, each in a type of its own: the types of layers, and of
            the parts of merged ones, by their names. Whatever is not among them is `plain`.
        kept: the formats of those types that the kernels have.
    """

    linear: QuantizationMethod
    table: QuantizationMethod
    plain: QuantizationMethod
    blocks: TypesByLayer | None = None
    kept: Mapping[str, QuantizationMethod] = field(default_factory=dict)

    def method_for(self, name: str, *, parts: Collection[str] = (), table: bool = False) -> QuantizationMethod:
        """The format of one layer.

        Args:
            name: the layer's full name.
            parts: of a merged layer, the names that its parts have in checkpoints, as siblings of the layer.
            table: whether it is an embedding or the output head.
        """
        if self.blocks is None:
            return self.table if table else self.linear
        names = [f"{name.rpartition('.')[0]}.{part}" if part else name for part in parts or ("",)]
        kept = [self.kept.get(self.blocks.get(part, ""), self.plain) for part in names]
        if len(set(kept)) == 1:
            return kept[0]
        packed = {part: method for part, method in zip(parts, kept, strict=True) if isinstance(method, Packed)}
        return PackedParts(packed) if packed else self.plain  # only native kernels put several products together


def uniform(method: QuantizationMethod) -> WeightFormats:
    """One format for everything."""
    return WeightFormats(method, method, method)


def select_formats(
    name: str | None, packing: Packing | None, blocks: TypesByLayer | None = None, *, on_device: bool = False
) -> WeightFormats:
    """The formats called `name`: packed for the native kernels, or with `packing` None for plain torch.

    Args:
        on_device: without native kernels, on a device that knows "fp8" and checkpoints' own codes, too.
        blocks: of a checkpoint whose matrices are in blocks. What the kernels have no such type for is
            kept plain, as is everything without kernels: its loader makes numbers of it.
    """

    def method(made: str | None) -> QuantizationMethod:
        if packing is not None:
            return Packed(made, packing)
        return Unquantized() if made is None else Coded(made)

    plain = method(None)
    if not blocks:
        is_made = name in MADE and (on_device or MADE[name].packed is not None)  # "fp8" is a checkpoint's own else
        # The head decides among all tokens at once and embeddings have no neighbours to average with: eight bits.
        return WeightFormats(method(name), method("int8"), plain) if is_made else uniform(plain)
    kept: dict[str, QuantizationMethod] = {kind: Coded(kind) for kind in KEPT} if on_device else {}
    if packing is not None:
        kept = {kind.name: Packed(None, packing, kind) for kind in PACKED_AS_THEY_ARE}
    return WeightFormats(plain, plain, plain, blocks=blocks, kept=kept)
