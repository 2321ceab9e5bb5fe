"""What block files there are on the disk, which blocks are to be written, and which are being read.

The `SwapSpace` keeps one where there is a folder for them. The worker writes and reads the files; here are names only,
so what it says of a file may be out of date: a read that fails is an answer, too.
"""

from collections.abc import Sequence

from quire.kvcache.pool import BlockPool
from quire.protocol.stats import TierStats
from quire.protocol.step import DiskNews

Request = tuple[int, int, bytes]  # group, block, name of its content


class DiskTier:
    """The orders of the plan being made.

    Attributes:
        known: names of the files by KV group.
        saves: blocks of the device that wait to be written.
        under_way: (group, host block) -> name of what is being read to it.
    """

    def __init__(self, stored: Sequence[Sequence[bytes]], host: Sequence[BlockPool], stats: TierStats) -> None:
        """`stored` are the names that the worker found at its start; `host` the pools; counts are kept in `stats`."""
        self._host, self._stats, self._is_open = host, stats, True
        self.known = [set(names) for names in stored]
        self.saves: list[Request] = []
        self._fetches: list[Request] = []  # to the host's blocks
        self.under_way: dict[tuple[int, int], bytes] = {}

    def save(self, group: int, block: int, name: bytes) -> None:
        """A device's block was computed: have it written, unless that was done before."""
        known = self.known[group]
        if name not in known and self._is_open:
            known.add(name)
            self.saves.append((group, block, name))

    def fetch(self, group: int, host: int, name: bytes) -> None:
        """Have a block read to a host block, which stays owned until the answer comes."""
        self._fetches.append((group, host, name))
        self.under_way[group, host] = name

    def owned(self, group: int) -> list[int]:
        """A group's host blocks that are being read to."""
        return [host for number, host in self.under_way if number == group]

    def end_plan(self) -> tuple[list[Request], list[Request]]:
        """The plan is complete: what is to be written, from device blocks, and to be read, to host blocks."""
        orders = self.saves, self._fetches
        self.saves, self._fetches = [], []
        return orders

    def take(self, news: DiskNews) -> list[bytes]:
        """The worker's answers: what was read can be found from now on. Returns names of which no read is under way."""
        self._stats.disk_written_blocks_total += news.num_written
        self._stats.disk_failed_writes_total += news.num_failed
        self._stats.disk_damaged_files_total += news.num_damaged
        self._stats.disk_removed_files_total += news.num_removed
        answered: dict[bytes, None] = {}
        for group, host, was_read in news.fetched:
            name = self.under_way.pop((group, host))
            answered[name] = None
            self._stats.disk_hits_total += was_read
            self._stats.disk_misses_total += not was_read
            if was_read and self._is_open:
                self._host[group].register(host, name)
            else:
                self.known[group].discard(name)
            self._host[group].release(host)
        left = set(self.under_way.values()) if answered else ()
        return [name for name in answered if name not in left]

    def cancel(self) -> None:
        """No answer will come any more to what was asked, and blocks that wait to be written may be lost by then."""
        for group, _, name in self.saves:
            self.known[group].discard(name)
        self.saves = []
        for group, host in self.under_way:
            self._host[group].release(host)
        self.under_way, self._fetches = {}, []

    def close(self) -> None:
        """Neither read nor write from now on, as what a name stands for may have changed."""
        self.begin_anew()
        self._is_open = False

    def begin_anew(self) -> None:
        """Forget all names, closed or not: new weights have files of their own, and none yet."""
        self._is_open = True
        self.saves = []
        for known in self.known:
            known.clear()
