"""The diary of cached blocks: what was stored and removed, in order, until somebody takes it to publish.

A KV manager keeps one where KV events are asked for. It knows names and tokens, and nothing of who reads them.
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby

from quire.kvcache.groups import KVGroup
from quire.kvcache.table import BlockTable
from quire.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class KVEventLog:
    """Events of all KV groups since they were last taken. A block that is named again in another place is no event."""

    def __init__(self, groups: list[KVGroup]) -> None:
        self._groups = groups
        self._events: list[KVEvent] = []
        for number, group in enumerate(groups):
            group.pool.on_evicted.append(partial(self._removed, self._name(number)))

    def stored(self, table: BlockTable, start: int, stop: int, name: Callable[[BlockTable, int], bytes]) -> None:
        """Full blocks [start, stop) of a table are about to be registered: note those that nobody could find yet."""
        for number, group in enumerate(self._groups):
            indices = range(max(start, table.first_block[number]), stop)
            for is_known, run in groupby(indices, lambda index, pool=group.pool: pool.holds(name(table, index))):
                if not is_known:
                    self._add_stored(table, number, list(run))

    def cleared(self) -> None:
        """Everything was forgotten."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _add_stored(self, table: BlockTable, number: int, run: list[int]) -> None:
        size, first, last = self._groups[number].block_size, run[0], run[-1] + 1
        parent, tokens = table.hashes[first - 1] if first else None, table.tokens(first * size, last * size)
        self._events.append(BlockStored(table.hashes[first:last], parent, tokens, size, group_idx=self._name(number)))

    def _removed(self, group_idx: int | None, evicted: tuple[int, bytes]) -> None:
        _, block_hash = evicted
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group_idx:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash], group_idx=group_idx))

    def _name(self, number: int) -> int | None:
        return number if len(self._groups) > 1 else None
