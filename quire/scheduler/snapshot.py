"""The scheduler's state as a person looks at it: who runs, who waits and why, which blocks are in use.

The engine core takes one when the live view asks. It changes nothing.
"""

from collections.abc import Iterable

from quire.protocol.stats import BlockGroup, EngineSnapshot, SequenceSnapshot
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence, SequenceStatus

MAX_SEQUENCES = 200


def take_snapshot(scheduler: Scheduler, now: float, watched: Iterable[str] = ()) -> EngineSnapshot:
    """The state now, the `watched` requests whole; ages count from arrival times, of the same clock as `now`."""
    stats = scheduler.stats()
    return EngineSnapshot(
        stats=stats,
        sequences=[_look_at(scheduler, s, now) for s in scheduler.first_sequences(MAX_SEQUENCES, watched)],
        num_sequences=stats.num_requests_running + stats.num_requests_waiting,
        blocks=b"".join(pool.states() for pool in scheduler.kv.pools),
        block_size=scheduler.kv.block_size,
        block_groups=list(map(BlockGroup, scheduler.kv.num_blocks, scheduler.kv.windows)),
    )


def _look_at(scheduler: Scheduler, sequence: Sequence, now: float) -> SequenceSnapshot:
    request = sequence.group.request
    return SequenceSnapshot(
        request_id=request.request_id,
        index=sequence.index,
        status="running" if sequence.status is SequenceStatus.RUNNING else "waiting",
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=len(sequence.output_token_ids),
        num_computed_tokens=sequence.num_computed_tokens,
        num_cached_tokens=sequence.group.num_cached_tokens or 0,
        num_blocks=sum(map(len, sequence.table.block_ids)) - sum(sequence.table.first_block),
        why=scheduler.why_waiting(sequence),
        seconds=now - request.arrival_time,
    )
