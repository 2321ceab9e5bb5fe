"""The scheduler's state as a person looks at it: who runs, who waits and why, which blocks are in use.

The engine core takes one when the live view asks. It changes nothing.
"""

import time

from quire.protocol.stats import EngineSnapshot, EngineStats, SequenceSnapshot
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence

MAX_SEQUENCES = 200


def take_snapshot(scheduler: Scheduler) -> EngineSnapshot:
    """The state now; request ages count from arrival times on the monotonic clock. O(blocks)."""
    sequences, now = scheduler.sequences(), time.monotonic()
    num_running = scheduler.num_running
    return EngineSnapshot(
        stats=EngineStats.of(scheduler),
        sequences=[_look_at(scheduler, s, i < num_running, now) for i, s in enumerate(sequences[:MAX_SEQUENCES])],
        num_sequences=len(sequences),
        blocks=scheduler.kv.block_states(),
        block_size=scheduler.kv.block_size,
    )


def _look_at(scheduler: Scheduler, sequence: Sequence, running: bool, now: float) -> SequenceSnapshot:
    request = sequence.group.request
    return SequenceSnapshot(
        request_id=request.request_id,
        index=sequence.index,
        status="running" if running else "waiting",
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=len(sequence.output_token_ids),
        num_computed_tokens=sequence.num_computed_tokens,
        num_cached_tokens=sequence.group.num_cached_tokens or 0,
        num_blocks=len(sequence.table.block_ids),
        why=scheduler.why_waiting(sequence),
        seconds=now - request.arrival_time,
    )
