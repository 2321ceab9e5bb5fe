"""Checkpoints that hold the experts of a layer as one tensor, which is cut into matrices as it is read.

Families' files name `cut_experts` in their `CheckpointFormat`.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from quire.models.weights import Cut, TensorSpec

_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_ENDS = {"": ".weight", "_bias": ".bias"}
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def cut_experts(spec: TensorSpec, hidden_size: int, by_turns: bool = False) -> Iterator[Cut]:
    """Of a layer's experts the matrix or vector of each, under the names that Mixtral's kin give them.

    Biases are [E, out], MXFP4 is [E, out, groups of 32, 16] and, of scales, [E, out, groups].

    Args:
        by_turns: rows of gates and of what they open come so, and not one half after the other; matrices are
            [E, in, out] then, else [E, out, in] as well, as transformers writes them.
    """
    found = _STACKED.fullmatch(spec.name)
    if found is None or len(spec.shape) != {"_bias": 2, "_blocks": 4}.get(found[3], 3) or 0 in spec.shape:
        yield spec, lambda tensor: tensor
        return
    experts, parts, kind = found[1], _PARTS[found[2]], found[3]
    turned = not kind and (by_turns or spec.shape[len(parts)] != hidden_size)
    num_rows, *columns = spec.shape[:0:-1] if turned else spec.shape[1:]
    for expert in range(spec.shape[0]):
        for number, part in enumerate(parts):
            half = range(num_rows * number // len(parts), num_rows * (number + 1) // len(parts))
            rows = range(number, num_rows, len(parts)) if by_turns else half

            def take(tensor: Tensor, expert: int = expert, rows: range = rows) -> Tensor:
                return (tensor[expert].t() if turned else tensor[expert])[rows.start : rows.stop : rows.step]

            size = spec.num_bytes // (spec.shape[0] * len(parts))
            name = f"{experts}.{expert}.{part}{_ENDS.get(kind, kind)}"
            yield replace(spec, name=name, shape=(len(rows), *columns), num_bytes=size), take
