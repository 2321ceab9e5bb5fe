"""Several engines' answers as one: their counters summed, their gauges as of one larger engine.

`replicas` answers calls with it and sums up stats. It knows the forms of messages, and nothing of who sent them.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from quire.protocol.core import Reply
from quire.protocol.stats import BlockGroup, EngineSnapshot, EngineStats, Limits
from quire.protocol.worker import Returned


def total_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Counts summed, shares averaged; limits are each engine's own, and the same for all."""
    return stats[0] if len(stats) == 1 else _total("", stats)


def total_snapshot(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """All sequences, the running ones first, and the blocks engine after engine, each a group of its own or several."""
    sequences = [sequence for one in snapshots for sequence in one.sequences]
    return EngineSnapshot(
        total_stats([one.stats for one in snapshots]),
        sorted(sequences, key=lambda sequence: sequence.status != "running"),
        sum(one.num_sequences for one in snapshots),
        b"".join(one.blocks for one in snapshots),
        snapshots[0].block_size,
        [group for one in snapshots for group in one.block_groups or [BlockGroup(len(one.blocks))]],
    )


def total_reply(replies: Sequence[Reply], holds: Callable[[list[Any]], bool] = all) -> Reply:
    """One answer to a call that went to all: the first error; snapshots joined; of bools, True where that holds."""
    first = next((reply for reply in replies if reply.fault is not None), replies[0])
    values: list[Any] = [reply.value for reply in replies]  # of one kind, as the calls were equal
    if first.fault is None and isinstance(first.value, EngineSnapshot):
        return Reply(first.call_id, total_snapshot(values))
    if first.fault is None and isinstance(first.value, Returned):
        return Reply(first.call_id, Returned([each for value in values for each in value.values]))
    return Reply(first.call_id, holds(values)) if isinstance(first.value, bool) else first


def _total(name: str, values: Sequence[Any]) -> Any:
    """Of one field's values."""
    values = [value for value in values if value is not None]
    first = values[0] if values else None
    if isinstance(first, dict):
        return {key: sum(value.get(key, 0) for value in values) for value in values for key in value}
    if isinstance(first, list):
        return [_total("", column) for column in zip_longest(*values)]
    if isinstance(first, int | float):
        return sum(values) / len(values) if name.endswith("_perc") else sum(values)
    if first is None or isinstance(first, Limits | str):
        return first
    fields = type(first).__struct_fields__
    return type(first)(**{field: _total(field, [getattr(value, field) for value in values]) for field in fields})
