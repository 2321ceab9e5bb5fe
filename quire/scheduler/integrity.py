"""Whether the scheduler's books agree: queues, groups, block tables and the pool.

`Scheduler.check_integrity` calls it, in tests and in debug mode. It reads everything and changes nothing.
"""

from quire.kvcache.manager import KVManager
from quire.scheduler.outcomes import Outcomes
from quire.scheduler.planner import Planner
from quire.scheduler.sequence import Sequence, SequenceStatus


def check_scheduler(planner: Planner, outcomes: Outcomes, kv: KVManager, num_in_flight: int, most_running: int) -> None:
    """Raise AssertionError unless everything agrees. O(everything)."""
    kv.check_integrity()
    running, waiting = planner.running.items, [*planner.waiting]
    preparing = list(planner.preparing.values())
    assert len(running) <= most_running, "more sequences run than may"
    assert len(waiting) == len(planner.waiting), "the waiting are counted wrong"
    for keys in ([s.key for s in running], list(map(planner.waiting.order_of, waiting))):
        assert all(a < b for a, b in zip(keys, keys[1:], strict=False)), "a queue is out of order"
    queues = {SequenceStatus.RUNNING: running, SequenceStatus.WAITING: waiting, SequenceStatus.PREPARING: preparing}
    for status, queue in queues.items():
        assert all(s.status is status for s in queue), "a sequence is in the wrong queue"
    queued = {s.sequence_id: s for s in [*running, *waiting, *preparing]}
    assert queued == outcomes.live, "a live sequence is in no queue, or a dead one in one"
    assert queued == {s.sequence_id: s for g in outcomes.groups.values() for s in g.sequences.values()}
    for sequence in queued.values():
        _check_sequence(sequence, kv.block_size, num_in_flight)
    swapped = {s.sequence_id for s in [*waiting, *preparing] if s.table.swapped is not None}
    held_there = kv.space.swapped_ids() if kv.space is not None else set()
    assert held_there == swapped, "the host holds blocks for somebody who does not wait"
    for group in outcomes.groups.values():
        assert group.unfinished, f"request {group.request.request_id} has ended and is still known"
        assert all(group.needs(index) for index in group.sequences), "a sequence goes on that nobody needs"
    held = [count - free for count, free in zip(kv.num_blocks, kv.num_free_blocks, strict=True)]
    assert running or held == kv.pins.num_blocks, "idle, but blocks are held"


def _check_sequence(s: Sequence, block_size: int, num_in_flight: int) -> None:
    where = f"sequence {s.sequence_id}"
    assert s.num_tokens == s.table.num_tokens, f"{where} counts its tokens wrong"
    own_key = s.own_key if s.status is not SequenceStatus.RUNNING else (*s.key[:-2], s.group.order, s.index)
    assert s.key == own_key, f"{where} has another key than its request"
    assert 0 <= s.num_computed_tokens < s.num_tokens + s.sits_out, f"{where} computed more than it has"
    assert 0 <= s.num_in_flight <= num_in_flight, f"{where} is in more plans than there are"
    if not s.num_in_flight:
        assert (s.num_expected, s.num_scheduled) == (s.num_tokens, s.num_computed_tokens), f"{where} expects too much"
    held = s.table.block_ids
    if s.status is SequenceStatus.RUNNING:
        needed = -(-s.num_computed_tokens // block_size)
        assert all(len(block_ids) >= needed for block_ids in held), f"{where} lacks blocks"
    else:
        assert not any(held), f"{where} waits with blocks"
        assert s.num_computed_tokens == s.announced == s.num_drafts == 0, f"{where} waits with a row"
        assert s.num_in_flight == 0 or s.awaits == "result", f"{where} waits, but a result is to come"
        assert not s.sits_out or s.awaits == "siblings", f"{where} can't go on, and is in the queue"
