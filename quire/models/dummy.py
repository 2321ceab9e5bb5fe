"""Random weights in place of a checkpoint's, for measurements: `load_format="dummy"`.

A `TensorSource`. Each tensor has a generator of its own, keyed by seed and name, so that its values depend on nothing
else. Must not know models.
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from quire.models.weights import TensorSpec

_STD = 0.02
# Random elements drawn per tensor, then repeated. A prime, so that no two rows of a weight begin at the same element:
# equal rows would tie the logits of different tokens.
_PERIOD = 262_139
# Elements per copy: a longer one is split among threads, which is slower by far while other work has the cores.
_PIECE = 32_767
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class DummySource:
    """N(0, 0.02) for every tensor of `shapes`, but ones for the scales of norms (vectors, `*weight`)."""

    num_files = 0

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int) -> None:
        self._dtype, self._seed = dtype, seed
        self.specs = [
            TensorSpec(name, _NAMES[dtype], shape, dtype.itemsize * math.prod(shape), "")
            for name, shape in shapes.items()
        ]

    def stream(self, skip: Collection[str]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor but those named in `skip`."""
        for spec in self.specs:
            if spec.name not in skip:
                yield spec, _random_tensor(f"{self._seed}/{spec.name}", spec.shape, self._dtype)


def _random_tensor(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if len(shape) == 1 and key.endswith("weight"):
        return torch.ones(shape, dtype=dtype)
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    flat = torch.empty(math.prod(shape), dtype=dtype)
    period = torch.empty(min(flat.numel(), _PERIOD)).normal_(0.0, _STD, generator=generator)
    pieces = period.to(flat.dtype).split(_PIECE)
    for part in flat.split(_PERIOD):
        for target, piece in zip(part.split(_PIECE), pieces, strict=False):
            target.copy_(piece[: target.numel()])
    return flat.view(shape)
