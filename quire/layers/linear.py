"""Linear layers, plain and merged.

A merged layer computes several projections of the same input in one product (query, key and value; gate and up); the
checkpoint holds them apart, as siblings of the merged layer. How weights are kept and multiplied is its
`QuantizationMethod`'s business. `quire.models.builder` makes these; `quire.models.weights` fills them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from quire import ops
from quire.attention.step import Step
from quire.ops.activation import Activation
from quire.ops.gather import Meeting
from quire.quantization.base import CheckpointSlot, MatrixShape, QuantizationMethod


@dataclass(frozen=True)
class Shard:
    """What a rank of a group has of a matrix: some of its rows, which are output features, or of its columns.

    Attributes:
        group: where the ranks meet.
        rows: of each part in the checkpoint, those that are this rank's, in order.
        inputs: where each rank's input features start, and their end, if each brings some; else all have all of them.
        outputs: likewise of output features, which then are gathered; else each keeps its own.
        columns: input features, if it has these only: then products of all ranks are summed up. Else all of them.
    """

    group: Meeting
    rows: Mapping[str, Sequence[range]]
    inputs: tuple[int, ...] | None = None
    outputs: tuple[int, ...] | None = None
    columns: range | None = None

    def bring(self, x: Tensor) -> Tensor:
        """The input features of all ranks."""
        return x if self.inputs is None else ops.gather(x, self.group, self.inputs)

    def give(self, y: Tensor) -> Tensor:
        """The output features of all ranks, or this one's."""
        if self.columns is not None:
            return ops.reduce(y, self.group)
        return y if self.outputs is None else ops.gather(y, self.group, self.outputs)

    @property
    def keeps(self) -> bool:
        """Whether `give` gives this rank's own."""
        return self.columns is None and self.outputs is None

    def own(self, loaded: Tensor) -> Tensor:
        """Of a checkpoint's tensor the columns that are here; a bias is added once."""
        if self.columns is None:
            return loaded
        if loaded.dim() == 1:
            return loaded if self.group.rank == 0 else torch.zeros_like(loaded)
        return loaded[:, self.columns.start : self.columns.stop]


@dataclass(frozen=True)
class Place:
    """Where a matrix stands in its model.

    Attributes:
        name: the layer's full name.
        method: its weight format.
        dtype: of activations.
        shard: what of it is here; None for all.
        rows: those of each part that are here, where they are in another order than the checkpoint's.
    """

    name: str
    method: QuantizationMethod
    dtype: torch.dtype
    shard: Shard | None = None
    rows: Mapping[str, Sequence[range]] | None = None


class Matrix(nn.Module):
    """Weights of one matrix in its format, and the filling of them.

    Args:
        parts: names in the checkpoint of what its rows are merged from, as siblings of the module -> rows, in order;
            the one part of a matrix that is not merged has the name "".

    Attributes:
        in_features: of all ranks together.
        rows: of each part, those that are here.
        lora: what adapters add to its products, or to its rows; None where none can.
    """

    def __init__(self, place: Place, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self.name = place.name
        self.parts = dict(parts)
        self.shard = place.shard
        whole = {part: (range(size),) for part, size in parts.items()}
        self.rows = place.rows or (whole if place.shard is None else place.shard.rows)
        self.lora: ops.LoraLayer | None = None
        self.in_features = in_features
        if place.shard is not None and place.shard.columns is not None:
            in_features = len(place.shard.columns)
        here = {part: sum(map(len, self.rows[part])) for part in parts}
        self.shape = MatrixShape(in_features, sum(here.values()), bias, here)
        self.method = place.method
        for name, weight in place.method.create_weights(self.shape, place.dtype, place.name).items():
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The parameters by name, as the weight format made them."""
        return cast(Mapping[str, Tensor], self._parameters)

    def checkpoint_slots(self, path: str) -> Iterator[CheckpointSlot]:
        """The place of each of its tensors; `path` is where the module stands."""
        start = 0
        for part, features in self.parts.items():
            owner = f"{path.rpartition('.')[0]}.{part}" if part else path
            shape = MatrixShape(self.in_features, features, self.shape.bias)
            for tensor, form in self.method.of_part(part).checkpoint_tensors(shape).items():
                load = partial(self._load, part, tensor, start)
                yield CheckpointSlot(f"{owner}.{tensor}", form, load, tensor in self.method.filled)
            start += self.shape.parts[part]

    def product(self, x: Tensor, lora: ops.LoraLayer | None, step: Step | None, wide: bool) -> Tensor:
        """[M, its input features] -> what all ranks, or this one, have of ``x @ W.T + b``, and what `lora` adds."""
        y = self.method.apply(self.weights, self.shape, x, wide=wide)
        y = y if lora is None else ops.lora(x, y, lora, adapted_rows(step))
        return y if self.shard is None else self.shard.give(y)

    def _load(self, part: str, tensor: str, start: int, loaded: Tensor) -> None:
        loaded = loaded if self.shard is None else self.shard.own(loaded)
        for rows in self.rows[part]:  # of a mapped file, the others are never read
            own = loaded[rows.start : rows.stop : rows.step]
            if tensor == "bias":
                self.weights["bias"][start : start + len(own)].copy_(own)
            else:
                self.method.load(self.weights, self.shape, own, start)
            start += len(rows)


class Linear(Matrix):
    """``x @ W.T + b``: [M, in_features] -> [M, out_features].

    Args:
        outputs: number of output features, or those of each part of a merged layer; of all ranks together.
    """

    def __init__(self, place: Place, in_features: int, outputs: int | Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(place, in_features, outputs if isinstance(outputs, Mapping) else {"": outputs}, bias=bias)

    def forward(
        self, x: Tensor, step: Step | None = None, *, wide: bool = False, gate: Activation | None = None
    ) -> Tensor:
        """See the class; `step` is None for the output head, whose rows are not a step's tokens.

        gate: a gated activation of the result, [M, out_features] -> [M, out_features / 2].
        """
        x = x if self.shard is None else self.shard.bring(x)
        alone = self.lora is None and (self.shard is None or self.shard.keeps)
        if gate is not None and alone and (operands := self.method.operands(self.weights)) is not None:
            return ops.gated_linear(x, gate, *operands)
        y = self.product(x, self.lora, step, wide)
        return y if gate is None else gate(y)


def adapted_rows(step: Step | None) -> ops.AdaptedRows:
    """Which rows have which adapter."""
    return () if step is None or step.adapters is None else step.adapters.rows
