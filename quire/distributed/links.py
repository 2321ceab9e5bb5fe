"""Where a worker meets the others: its tensor group, and links to the neighbouring stages, in one shared memory.

A link is for the hidden states between two stages. The first tensor rank of the one writes (all of them have the same
rows), all ranks of the other read, in the buffers that both compute in. Two take turns, so that a stage computes a step
while the next one computes the step before. Workers and their runners use it; it must not know models, nor plans.
"""

import torch
from torch import Tensor

from quire.config.worker import WorkerConfig
from quire.distributed.groups import HEAD_BYTES, Group, segment_bytes

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


def shared_bytes(config: WorkerConfig) -> int:
    """Size of the memory that all workers share, zeros to begin with: the tensor groups, and then the links."""
    return config.num_stages * segment_bytes(config.model.vocab_size) + (config.num_stages - 1) * _link_bytes(config)


def tensor_group(config: WorkerConfig) -> Group:
    """Of the ranks that share the layers of the worker's stage."""
    size = segment_bytes(config.model.vocab_size)
    start = size * config.stage.number
    return Group(config.group, config.rank % config.tensor_size, config.tensor_size, range(start, start + size))


def open_link(config: WorkerConfig, before: bool) -> Link | None:
    """To the stage before the worker's, or after it; None where there is none."""
    stage, rank = config.stage, config.rank % config.tensor_size
    if stage.is_first if before else stage.is_last:
        return None
    size = _link_bytes(config)
    start = config.num_stages * segment_bytes(config.model.vocab_size) + (stage.number - before) * size
    path = config.group if before or rank == 0 else None
    group = Group(path, 1 + rank if before else 0, 1 + config.tensor_size, range(start, start + size))
    return Link(group, config.model.hidden_size, getattr(torch, config.model.dtype))


def _link_bytes(config: WorkerConfig) -> int:
    row_bytes = config.model.hidden_size * getattr(torch, config.model.dtype).itemsize
    return HEAD_BYTES + 2 * -(-config.max_num_batched_tokens * row_bytes // _PAGE) * _PAGE
