"""The group of ranks that compute one model together, as one of them sees it: shared memory where they meet.

The worker opens it, layers gather their slices through it (`quire.ops.gather`), and what was measured is agreed upon in
it. Natively a meeting is a part of a program (csrc/meeting.h has the same layout); without the compiled kernels it is
done here, in plain Python. It must not know models, nor who started the ranks: executors make the memory, all zeros.
"""

import functools
import itertools
import mmap
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.errors import EngineDeadError
from quire.ops.native.library import library

HEAD_BYTES = 4096
_PLACE_WORDS = 16  # uint32 words from one rank's counter to the next; before the first: aborted, sleepers
MAX_RANKS = HEAD_BYTES // (4 * _PLACE_WORDS) - 1
_BUFFER_BYTES = 4 * 2**20  # what is larger is gathered in several turns
_SPINS = 200  # of the plain wait, before it sleeps between two looks
_PAUSE = 50e-6
T = TypeVar("T")


class GroupAbortedError(EngineDeadError):
    """Another rank of the group is gone, and what was being computed with it is lost."""


def segment_bytes(vocab_size: int) -> int:
    """Size of the shared memory of a group whose model has such a vocabulary: its rows of logits are the widest."""
    return HEAD_BYTES + 2 * max(_BUFFER_BYTES, -(-4 * vocab_size // 4096) * 4096)


class Group:
    """One rank's view of its group.

    Args:
        path: of the shared memory, `segment_bytes` of zeros to begin with; a file, or ``/proc/PID/fd/N`` of its maker.
            None: this rank meets nobody and takes what it finds for theirs, so that it can be measured alone.
        rank, size: this one's number, and how many there are; at most MAX_RANKS.
        part: the bytes of that memory which are this group's, whole pages; all of a file's where it is empty.

    Attributes:
        address: of the shared memory.
        capacity: bytes of each of its two buffers.
        buffers: where what is gathered lies, by turns.
    """

    def __init__(self, path: str | None, rank: int, size: int, part: range = range(0)) -> None:
        assert 0 <= rank < size <= MAX_RANKS
        self.rank, self.size = rank, size
        if path is None:
            memory = mmap.mmap(-1, len(part))
        else:
            with open(path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), len(part), offset=part.start)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = whole.data_ptr()
        self.capacity = (len(whole) - HEAD_BYTES) // 2
        self.buffers = whole[HEAD_BYTES:].split(self.capacity)
        words = np.frombuffer(memory, np.uint32, HEAD_BYTES // 4)
        self._aborted, self._arrivals = words[:1], words[_PLACE_WORDS::_PLACE_WORDS][:size]
        self._alone = path is None
        if self._alone:
            self._arrivals[np.arange(size) != rank] = 2**30  # they have been everywhere

    def abort(self) -> None:
        """Let every rank that waits here, or ever will, raise GroupAbortedError."""
        self._aborted[0] = 1

    def after(self, name: str) -> None:
        """What the host does after a program's operation of that name: nothing, what it made is whole."""

    def check(self) -> None:
        """Raise GroupAbortedError where the group was aborted: what programs gathered since is void."""
        if self._aborted[0]:
            why = "another rank of its group failed, or the engine was stopped"
            raise GroupAbortedError(f"rank {self.rank} of {self.size} stops: {why}.")

    def agree(self, value: T) -> T:
        """Rank 0's value (numbers, texts, lists and dicts of them) for all; nobody goes on before all have come."""
        buffer = self._buffer().numpy()
        if self.rank == 0:
            text = msgspec.msgpack.encode(value)
            assert 8 + len(text) <= self.capacity
            buffer[: 8 + len(text)] = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
        self._meet()
        if self._alone:
            return value
        length = int.from_bytes(buffer[:8].tobytes(), "little")
        return value if self.rank == 0 else msgspec.msgpack.decode(buffer[8 : 8 + length].tobytes(), type=type(value))

    def gather(self, x: Tensor, starts: Sequence[int]) -> Tensor:
        """Columns of all ranks: [T, starts[rank + 1] - starts[rank]] -> [T, starts[-1]]."""
        out = x.new_empty(x.shape[0], starts[-1])
        at_once = self.capacity // (starts[-1] * x.itemsize)
        for part, whole in zip(x.split(at_once), out.split(at_once), strict=True):
            buffer = self._buffer().view(x.dtype)
            bounds = [len(part) * start for start in starts]
            slices = [buffer[a:b].view(len(part), -1) for a, b in zip(bounds, bounds[1:], strict=False)]
            slices[self.rank].copy_(part)
            self._meet()
            torch.cat(slices, 1, out=whole)
        return out

    def gather_rows(self, x: Tensor, ids: Tensor, starts: Sequence[int]) -> Tensor:
        """Rows of all ranks, [T, H] of which each has those whose id is in its range: -> [T, H]."""
        out = torch.empty_like(x)
        at_once = self.capacity // (x.shape[1] * x.itemsize)
        own = (ids >= starts[self.rank]) & (ids < starts[self.rank + 1])
        for part, has, whole in zip(x.split(at_once), own.split(at_once), out.split(at_once), strict=True):
            rows = self.rows(len(part), x.shape[1], x.dtype)
            rows[has] = part[has]
            self._meet()
            whole.copy_(rows)
        return out

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' [T, N], in the order of ranks, in float32: the same on all of them."""
        out = torch.empty_like(x)
        at_once = self.capacity // (self.size * x.shape[1] * x.itemsize)
        for part, whole in zip(x.split(at_once), out.split(at_once), strict=True):
            addends = self.rows(self.size * len(part), x.shape[1], x.dtype).view(self.size, *part.shape)
            addends[self.rank].copy_(part)
            self._meet()
            whole.copy_(functools.reduce(torch.add, addends.float()))
        return out

    @property
    def turn(self) -> int:
        """How many turns this rank has ended."""
        return int(self._arrivals[self.rank])

    def end_turn(self) -> None:
        """Let others see that this rank has ended its turn, and wait for nobody."""
        if (kernels := library()) is not None:
            kernels.quire_arrive(self.address, self.rank)
        else:
            self._arrivals[self.rank] += np.uint32(1)

    def wait_for(self, rank: int, turn: int) -> None:
        """Wait until another rank has ended so many turns."""
        if (kernels := library()) is not None:
            kernels.quire_await(self.address, rank, turn % 2**32)
            return self.check()
        for spins in itertools.count():
            if (int(self._arrivals[rank]) - turn) % 2**32 < 2**31:
                return None
            self.check()
            time.sleep(0 if spins < _SPINS else _PAUSE)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """The buffer of this rank's turn, as so many rows."""
        return self._buffer().view(dtype)[: num_rows * width].view(num_rows, width)

    def _buffer(self) -> Tensor:
        return self.buffers[self.turn & 1]

    def _meet(self) -> None:
        """End this rank's turn, and wait until all have."""
        if (kernels := library()) is not None:
            kernels.quire_meet(self.address, self.rank, self.size)
            return self.check()
        self.end_turn()
        for rank in range(self.size):
            self.wait_for(rank, self.turn)
