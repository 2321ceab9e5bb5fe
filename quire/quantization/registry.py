"""Chooses the weight formats of a model. The worker asks once at start-up; a new format is one line here."""

from dataclasses import dataclass

from quire.quantization.base import QuantizationMethod
from quire.quantization.packed import Allocate, Packed
from quire.quantization.unquantized import Unquantized
from quire.quantization.weight_only import WeightOnly

# Name -> bits of linear layers, bits of embeddings and the output head. The head decides among all tokens at once and
# embeddings have no neighbours to average with: they keep eight bits.
_BITS: dict[str | None, tuple[int | None, int | None]] = {None: (None, None), "int8": (8, 8), "int4": (4, 8)}


@dataclass(frozen=True)
class WeightFormats:
    """The formats of a model's matrices."""

    linear: QuantizationMethod
    table: QuantizationMethod  # embeddings and the output head


def select_formats(name: str | None, allocate: Allocate | None, filled: bool = False) -> WeightFormats:
    """The formats called `name`: packed for the native kernels, or with `allocate` None for plain torch."""
    linear, table = _BITS[name]

    def method(bits: int | None) -> QuantizationMethod:
        if allocate is not None:
            return Packed(bits, allocate, filled)
        return Unquantized() if bits is None else WeightOnly(bits)

    return WeightFormats(method(linear), method(table))
