"""Where a worker meets the others: its tensor group, and links to the neighbouring stages, in one shared memory.

A link is for the hidden states between two stages. The first tensor rank of the one writes (all of them have the same
rows), all ranks of the other read, in the buffers that both compute in. Two take turns, so that a stage computes a step
while the next one computes the step before. Workers and their runners use it; it must not know models, nor plans.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.worker import WorkerConfig
from quire.distributed.groups import HEAD_BYTES, Group, segment_bytes
from quire.distributed.network import NetworkGroup, NetworkLink, meet

_PAGE = 4096


class Link:
    """One end.

    Args:
        group: of the writer, rank 0, and its readers; other tensor ranks of the writer's have one that meets nobody.
        width, dtype: of the rows.
    """

    def __init__(self, group: Group, width: int, dtype: torch.dtype) -> None:
        self._group, self._width, self._dtype = group, width, dtype

    def room(self, num_rows: int) -> Tensor:
        """Where the next step's rows are to be written, [num_rows, width], once what was there has been read."""
        for reader in range(1, self._group.size):
            self._group.wait_for(reader, self._group.turn - 1)
        return self._group.rows(num_rows, self._width, self._dtype)

    def arrived(self, num_rows: int) -> Tensor:
        """The next step's rows, [num_rows, width], once they are there."""
        self._group.wait_for(0, self._group.turn + 1)
        return self._group.rows(num_rows, self._width, self._dtype)

    def done(self) -> None:
        """This end has written, or read, the step's rows."""
        self._group.end_turn()


AnyLink = Link | NetworkLink


def shared_bytes(config: WorkerConfig) -> int:
    """Size of the memory that all workers share, zeros to begin with: the tensor groups, and then the links."""
    return config.num_stages * segment_bytes(config.model.vocab_size) + (config.num_stages - 1) * _link_bytes(config)


def tensor_group(config: WorkerConfig) -> Group | NetworkGroup:
    """Of the ranks that share the layers of the worker's stage."""
    size, stage = segment_bytes(config.model.vocab_size), config.stage.number
    return _open(config, _ranks(config, stage), range(size * stage, size * (stage + 1)))


def open_link(config: WorkerConfig, before: bool) -> AnyLink | None:
    """To the stage before the worker's, or after it; None where there is none."""
    stage = config.stage
    if stage.is_first if before else stage.is_last:
        return None
    size = _link_bytes(config)
    start = config.num_stages * segment_bytes(config.model.vocab_size) + (stage.number - before) * size
    readers, part = _ranks(config, stage.number + (not before)), range(start, start + size)
    group = _open(config, [readers[0] - config.tensor_size, *readers], part)
    rows = config.model.hidden_size, getattr(torch, config.model.dtype)
    return Link(group, *rows) if isinstance(group, Group) else NetworkLink(group, *rows)


def _ranks(config: WorkerConfig, stage: int) -> range:
    """Of a stage."""
    return range(stage * config.tensor_size, (stage + 1) * config.tensor_size)


def _open(config: WorkerConfig, ranks: Sequence[int], part: range) -> Group | NetworkGroup:
    """The group of these ranks, in this part of the memory where all share one; of one that meets nobody for others."""
    if config.rank not in ranks:
        return Group(None, 0, len(ranks), part)
    rank = ranks.index(config.rank)
    if config.nodes:
        return meet(str(config.group), {other: config.nodes[other] for other in ranks}, rank, len(part))
    return Group(config.group, rank, len(ranks), part)


def _link_bytes(config: WorkerConfig) -> int:
    row_bytes = config.model.hidden_size * getattr(torch, config.model.dtype).itemsize
    return HEAD_BYTES + 2 * -(-config.max_num_batched_tokens * row_bytes // _PAGE) * _PAGE
