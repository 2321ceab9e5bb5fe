"""What a rank of a group has of each layer, by which dimension a layer is split.

The builder asks it for every layer and gets None where nothing is shared. Every matrix is split by its output features,
so that each sum over its inputs stays whole on one rank, with the bits that one rank alone would get: what the next
matrix needs of the others' features is gathered before it. Where ranks reduce, the second of two matrices is split by
its input features instead, and what ranks made of theirs is summed up. Must not know families.
"""

from dataclasses import dataclass, replace

from quire.attention.base import AttentionSpec
from quire.errors import ModelLoadError
from quire.layers.linear import Shard
from quire.ops.experts import Owners
from quire.ops.gather import Meeting
from quire.ops.native.matrix import BLOCK_ROWS


@dataclass(frozen=True)
class HeadShards:
    """Of an attention block: what this rank attends to, and its parts of the projections."""

    spec: AttentionSpec
    qkv: Shard | None = None
    output: Shard | None = None


class Sharding:
    """The parts of this rank; all of everything where `group` is None.

    Attributes:
        whole_experts: of a mixture's experts each rank has some, and not a part of each; between nodes always, where
            ranks would meet for each of them.
        asks_experts: that was asked for.
        reduces: partial sums are added up, so the bits are not those of one rank.
    """

    def __init__(self, group: Meeting | None = None, whole_experts: bool = False, reduces: bool = False) -> None:
        self._group, self.asks_experts, self.reduces = group, whole_experts, reduces
        self.whole_experts = whole_experts or (group is not None and group.after("gather_experts") is not None)

    def experts(self, name: str, num_experts: int) -> Owners | None:
        """Who has which of a mixture's experts, where each rank has whole ones (ModelLoadError: there are too few)."""
        if self._group is None or not self.whole_experts:
            return None
        if num_experts < self._group.size:
            raise ModelLoadError(
                f"{name!r} has {num_experts} experts for {self._group.size} ranks: lower tensor_parallel_size"
                f"{', or leave out enable_expert_parallel' * self.asks_experts}."
            )
        return Owners(self._group, _shares(num_experts, self._group.size, 1))

    def attention(self, name: str, spec: AttentionSpec, size: int, fused: bool) -> HeadShards:
        """Query heads are split, and KV heads with them; where these are fewer than ranks, several ranks have the same.

        Args:
            size: of hidden states.
            fused: whether the checkpoint has queries, keys and values as one matrix.

        Raises:
            ModelLoadError: heads that can't be split so, by the layer's name.
        """
        if (group := self._group) is None:
            return HeadShards(spec)
        heads, kv_heads, ranks = spec.num_heads, spec.num_kv_heads, group.size
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            raise ModelLoadError(
                f"{name!r} has {heads} heads and {kv_heads} KV heads, which {ranks} ranks can't share: "
                "tensor_parallel_size must divide the heads, and divide the KV heads or be a multiple of them."
            )
        own, own_kv = heads // ranks, max(1, kv_heads // ranks)
        first, first_kv = group.rank * own, group.rank * kv_heads // ranks
        dim = spec.head_dim
        query = range(first * dim, (first + own) * dim)
        key = range(first_kv * dim, (first_kv + own_kv) * dim)
        if fused:
            after = [range(key.start + start, key.stop + start) for start in (heads * dim, (heads + kv_heads) * dim)]
            rows = {"": (query, *after)}
        else:
            rows = {"q_proj": (query,), "k_proj": (key,), "v_proj": (key,)}
        sinks = None if spec.sinks is None else spec.sinks[first : first + own]
        mine = replace(spec, num_heads=own, num_kv_heads=own_kv, sinks=sinks)
        return HeadShards(mine, Shard(group, rows), self._whole(group, _shares(heads * dim, ranks, dim), size))

    def inner(self, name: str, size: int, inner_size: int, *parts: str) -> tuple[Shard | None, Shard | None]:
        """Of an MLP: what makes its inner features, merged of `parts`, and what makes `size` of them.

        Raises:
            ModelLoadError: inner features that can't be split, by the layer's name.
        """
        if (group := self._group) is None:
            return None, None
        # Kernels finish whole blocks: no other rows may share a block than on one rank.
        unit = BLOCK_ROWS if inner_size % BLOCK_ROWS == 0 else inner_size // group.size
        if inner_size < unit * group.size or not unit or (unit != BLOCK_ROWS and inner_size % group.size):
            raise ModelLoadError(
                f"{name!r} has {inner_size} inner features, which {group.size} ranks can't share: "
                f"tensor_parallel_size must divide them, or their blocks of {BLOCK_ROWS}."
            )
        starts = _shares(inner_size, group.size, unit)
        rows = range(starts[group.rank], starts[group.rank + 1])
        return Shard(group, dict.fromkeys(parts, (rows,))), self._whole(group, starts, size)

    def gathered(self, num_rows: int) -> Shard | None:
        """Of a table of that many tokens, or of a matrix whose so many features all ranks get, as the output head's."""
        group = self._group
        return None if group is None else self._whole(group, None, num_rows)

    def _whole(self, group: Meeting, inputs: tuple[int, ...] | None, size: int) -> Shard:
        """Of what takes features of all ranks, and gives `size` to all."""
        if self.reduces and inputs is not None:
            return Shard(group, {"": (range(size),)}, columns=range(inputs[group.rank], inputs[group.rank + 1]))
        unit = BLOCK_ROWS if size % BLOCK_ROWS == 0 else 1
        outputs = _shares(size, group.size, unit)
        return Shard(group, {"": (range(outputs[group.rank], outputs[group.rank + 1]),)}, inputs, outputs)


def _shares(total: int, num_ranks: int, unit: int) -> tuple[int, ...]:
    """Where each rank's part of `total` begins, in whole units, and the end: as even as may be."""
    return tuple(total // unit * rank // num_ranks * unit for rank in range(num_ranks + 1))
