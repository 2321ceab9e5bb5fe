"""Groups of ranks on several machines, as one of them sees it: what `Group` and `Link` are within one.

Gloo carries rows, as bytes, so that what arrives is what was computed. Programs call it as a function of the host.
Ranks find each other in a store that one of them keeps; those of one node meet in its shared memory all the same. It
must not know models, nor who started the ranks.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from socket import socket
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from quire.distributed.groups import HEAD_BYTES, Group, GroupAbortedError
from quire.utils.host_memory import make_memory

_SECONDS = timedelta(seconds=120)  # for all to come
_OWN_BYTES = 2**32  # of a buffer, for any step; memory that is not touched costs nothing
T = TypeVar("T")


def make_place(door: socket) -> Store:
    """Where ranks find each other, for as long as it is held: who comes there, to a socket that listens, is let in."""
    host, port = door.getsockname()[:2]
    return TCPStore(host, port, None, True, _SECONDS, wait_for_workers=False, master_listen_fd=door.detach())


def meet(where: str, nodes: Mapping[int, str], rank: int, num_bytes: int) -> "Group | NetworkGroup":
    """The group of the ranks on these nodes, of which this process is the one at the place `rank`.

    Args:
        where: host and port of the door that `make_place` was given.
        nodes: of each rank, by its number: an address of its machine, a blank, and what tells it from others there.
        num_bytes: of the memory where they meet, if they are on one node.
    """
    host, _, port = where.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_SECONDS)
    own, names = PrefixStore(str(list(nodes)), store), list(nodes.values())
    if len(set(names)) > 1:
        return NetworkGroup(own, names[rank].partition(" ")[0], rank, len(names))
    if rank == 0:
        own.set("memory", f"/proc/{os.getpid()}/fd/{make_memory(num_bytes)}")
    return Group(own.get("memory").decode(), rank, len(names))


class NetworkGroup:
    """One rank's view of its group.

    Args:
        store: of the group's own keys.
        host: the address by which others reach this machine.
        rank, size: this one's number, and how many there are.
    """

    def __init__(self, store: Store, host: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._own = Group(None, rank, size, range(HEAD_BYTES + 2 * _OWN_BYTES))  # where programs put this rank's rows
        self.address, self.capacity = self._own.address, self._own.capacity
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=host)], _SECONDS
        self._gloo: Any = ProcessGroupGloo(store, rank, size, options)
        # A step may take long; who ends breaks its connections, and who hangs is found by its beats.
        self._gloo._set_default_timeout(timedelta(days=100))

    def after(self, name: str) -> Callable[[Tensor], Tensor]:
        """What makes whole what a program's operation of that name has made of this rank's rows, and zeros."""
        return self.reduce if name == "reduce" else self._join

    def check(self) -> None:
        """Nothing: where another rank is gone, gathering itself raises."""

    def agree(self, value: T) -> T:
        """Rank 0's value (numbers, texts, lists and dicts of them) for all; nobody goes on before all have come."""
        own = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        length = torch.tensor([len(own)])
        self.broadcast(length)
        text = own if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        self.broadcast(text)
        self._do("barrier")
        return value if self.rank == 0 else msgspec.msgpack.decode(text.numpy().tobytes(), type=type(value))

    def gather(self, x: Tensor, starts: Sequence[int]) -> Tensor:
        """Columns of all ranks: [T, starts[rank + 1] - starts[rank]] -> [T, starts[-1]]."""
        return self._join(torch.nn.functional.pad(x, (starts[self.rank], starts[-1] - starts[self.rank + 1])))

    def gather_rows(self, x: Tensor, ids: Tensor, starts: Sequence[int]) -> Tensor:
        """Rows of all ranks, [T, H] of which each has those whose id is in its range: -> [T, H]."""
        own = (ids >= starts[self.rank]) & (ids < starts[self.rank + 1])
        return self._join(torch.where(own[:, None], x, 0))

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' [T, N], in the order of ranks, in float32, rounded once."""
        return functools.reduce(torch.add, [part.float() for part in self._of_all(x)]).to(x.dtype)

    def broadcast(self, x: Tensor) -> None:
        """Bring rank 0's numbers to all."""
        self._do("broadcast", x, 0)

    def _join(self, x: Tensor) -> Tensor:
        return functools.reduce(torch.bitwise_or, [part.view(torch.uint8) for part in self._of_all(x)]).view(x.dtype)

    def _of_all(self, x: Tensor) -> list[Tensor]:
        assert x.nbytes * self.size <= self.capacity
        for buffer in self._own.buffers:  # in which what others have must be zeros
            buffer[: x.nbytes * self.size].zero_()
        own = x.contiguous().view(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._do("allgather", [parts], [own])
        return [part.view(x.dtype) for part in parts]

    def _do(self, name: str, *given: Any) -> None:
        try:
            getattr(self._gloo, name)(*given).wait()
        except RuntimeError as error:
            what = f"rank {self.rank} of {self.size} has lost another rank, or the way there"
            raise GroupAbortedError(f"{what} ({str(error).splitlines()[0]})") from error


class NetworkLink:
    """One end of a link: the group's rank 0 writes, the others read.

    Args:
        width, dtype: of the rows.
    """

    def __init__(self, group: NetworkGroup, width: int, dtype: torch.dtype) -> None:
        self._group, self._width, self._dtype = group, width, dtype

    def room(self, num_rows: int) -> Tensor:
        """Where the next step's rows are to be written, [num_rows, width]."""
        self._rows = torch.empty(num_rows, self._width, dtype=self._dtype)
        return self._rows

    def arrived(self, num_rows: int) -> Tensor:
        """The next step's rows, [num_rows, width], once they are there."""
        self._group.broadcast(self.room(num_rows).view(torch.uint8))
        return self._rows

    def done(self) -> None:
        """This end has written, or read, the step's rows: the next stage gets them when it asks for them."""
        if self._group.rank == 0:
            self._group.broadcast(self._rows.view(torch.uint8))
