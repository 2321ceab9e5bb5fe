"""Which layers of a model adapters can change, and the adapters that are in their places.

A worker has one beside its model, and loads adapters with it. Names of layers are the checkpoint's, as PEFT's are. Of a
model that several share it holds the part that is here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quire.layers.attention import SelfAttention
from quire.layers.embedding import TiedHead, VocabEmbedding
from quire.layers.linear import Linear, Matrix
from quire.layers.moe import MixtureOfExperts
from quire.ops import Adapted, LoraLayer, LoraMatrices, TokenSlots

Packed = dict[LoraLayer, dict[int, Adapted]]  # an adapter by layer and part


@dataclass(frozen=True)
class Target:
    """What a module of the checkpoint is here.

    Attributes:
        shapes: of A and B.
        rows: of a matrix's output features, or of a table's ids, those that are here.
        columns: likewise of its input features; None for all.
    """

    layer: LoraLayer
    part: int
    shapes: tuple[int, int]
    rows: Sequence[range]
    columns: range | None = None
    is_table: bool = False

    def pack(self, a: Tensor, b: Tensor, scale: float) -> LoraMatrices:
        """What is here of an adapter's factors, as `LoraSlots.put` wants them; it changes nothing."""
        if self.is_table:
            own = LoraMatrices(_rows(a.t(), self.rows), b, scale)
        else:
            here = a if self.columns is None else a[:, self.columns.start : self.columns.stop]
            own = LoraMatrices(here, _rows(b, self.rows), scale)
        return self.layer.packed(self.part, own)


class LoraSlots:
    """The places of a model's adapters.

    Args:
        name_of: the checkpoint's name of a parameter here.
        like: a tensor of the adapters' type, where they are to be.
        max_rank: 0 where adapters are virtual tokens alone.
        native: programs are recorded of the model, by kernels.

    Attributes:
        targets: what adapters can change, by the checkpoint's names of modules.
        attentions: those that are here, by the number of their layer.
        num_layers: those elsewhere included.
        tokens: for who runs such programs; None where torch computes.
    """

    def __init__(
        self,
        model: nn.Module,
        name_of: Callable[[str], str],
        num_slots: int,
        max_rank: int,
        *,
        like: Tensor,
        native: bool = False,
    ) -> None:
        self.tokens = TokenSlots() if native else None
        self._layers: list[LoraLayer] = []
        self.attentions: dict[int, SelfAttention] = {}
        self.num_layers = 0
        for path, module in model.named_modules():
            if isinstance(module, SelfAttention):
                layers, number = path.rsplit(".", 2)[:2]
                width = 2 * module.spec.num_kv_heads * module.spec.head_dim
                prefix = LoraLayer([0, width], num_slots, 0, like, self.tokens)
                module.spec = replace(module.spec, prefix=prefix)
                self._layers.append(prefix)
                self.attentions[int(number)] = module
                self.num_layers = len([*model.get_submodule(layers).children()])
        self.targets: dict[str, Target] = {}
        for path, module, parts in _adaptable(model):
            if not (max_rank or isinstance(module, VocabEmbedding)):
                continue
            sizes = [sum(map(len, rows)) for rows, _ in parts.values()]
            is_table = isinstance(module, VocabEmbedding)
            matrix = module.embedding if isinstance(module, TiedHead) else module
            inner = matrix.in_features
            starts = [0, inner] if is_table else [sum(sizes[:i]) for i in range(len(sizes) + 1)]
            module.lora = layer = LoraLayer(starts, num_slots, max_rank, like, self.tokens)
            self._layers.append(layer)
            columns = None if matrix.shard is None else matrix.shard.columns
            for number, (part, (rows, size)) in enumerate(parts.items()):
                owner = f"{path.rpartition('.')[0]}.{part}" if part else path
                shapes = (size, inner) if is_table else (inner, size)
                name = name_of(f"{owner}.weight").removesuffix(".weight")
                self.targets[name] = Target(layer, number, shapes, rows, columns, is_table)

    def put(self, slot: int, packed: Packed) -> None:
        """Let an adapter have this place."""
        for layer in self._layers:
            layer.put(slot, packed.get(layer, {}))


Parts = dict[str, tuple[Sequence[range], int]]  # by name, the rows that are here, and how many there are


def _adaptable(model: nn.Module, path: str = "") -> Iterator[tuple[str, Matrix | TiedHead, Parts]]:
    """Each layer that an adapter can change."""
    for name, module in model.named_children():
        full = f"{path}.{name}" if path else name
        if isinstance(module, Linear | VocabEmbedding | TiedHead):
            matrix = module.embedding if isinstance(module, TiedHead) else module
            yield full, module, {part: (matrix.rows[part], size) for part, size in matrix.parts.items()}
        elif name != "experts" or not isinstance(model, MixtureOfExperts):  # their rows are other than a step's
            yield from _adaptable(module, full)


def _rows(tensor: Tensor, rows: Sequence[range]) -> Tensor:
    return torch.cat([tensor[part.start : part.stop : part.step] for part in rows])
