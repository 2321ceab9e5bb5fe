"""Why sequences wait: the one table of reasons, how many wait for each, and each one's own with its numbers.

`Scheduler` asks for its stats and for the live view. It reads the planner and changes nothing; a reason more is an
entry of `REASONS`, and its numbers are given in `why`.
"""

from quire.kvcache.manager import KVManager
from quire.scheduler.planner import Planner
from quire.scheduler.sequence import Sequence, SequenceStatus

# Reason -> what it says. Of those that wait for room, all but "blocks" hold for everyone who waits.
REASONS = {
    "capacity": "{num_running} of at most {max_running} sequences run",
    "budget": "the step's {budget} tokens were spent on sequences before it",
    "blocks": "it needs up to {num_blocks} KV blocks; free: {num_free}",
    "order": "another request comes first",
    "next_step": "no step was planned since it came, as while the engine is paused",
    # Of those that prepare, which hold up nobody:
    "prefix": "its beginning is being computed for another request",
    "disk": "its beginning is being read from the disk",
    "adapter": "its adapter is being loaded, or awaits a place",
    "grammar": "the grammar of its output is being compiled",
    "result": "it was preempted, and its next token is being computed",
    "siblings": "it was preempted, and its next token is chosen once the other beams of its request are computed",
}


def waiting_reasons(planner: Planner) -> dict[str, int]:
    """Why sequences wait -> how many."""
    reasons = {awaited: count for awaited, count in planner.num_preparing.items() if count}
    num_waiting = len(planner.waiting)
    if num_waiting:
        num_first = 1 if planner.reason == "blocks" else num_waiting
        reasons[planner.reason or "next_step"] = num_first
        if num_waiting > num_first:
            reasons["order"] = num_waiting - num_first
    return reasons


def why(planner: Planner, kv: KVManager, sequence: Sequence) -> str:
    """Why a sequence does not run: a reason, its numbers, and who comes first by the policy."""
    reason = sequence.awaits or planner.reason or "next_step"
    waits = sequence.status is SequenceStatus.WAITING
    is_first = not waits or planner.waiting.first is sequence
    if reason == "blocks" and not is_first:
        reason = "order"
    steps = {"num_running": len(planner.running), "max_running": planner.max_running, "budget": planner.budget()}
    blocks = {"num_blocks": -(-sequence.num_tokens // kv.block_size), "num_free": min(kv.num_free_blocks)}
    text = REASONS[reason].format(**steps, **blocks)
    if is_first or reason == "next_step":
        return f"{reason}: {text}"
    before = _who_comes_first(planner, sequence)
    return f"order: {before}" if reason == "order" else f"{reason}: {text}; {before}"


def _who_comes_first(planner: Planner, sequence: Sequence) -> str:
    num_lanes, num_before = planner.waiting.place(sequence)
    parts = [f"{num_before} {'request comes' if num_before == 1 else 'requests come'} first"] if num_before else []
    if num_lanes:
        parts.append(f"{num_lanes} other {'client is' if num_lanes == 1 else 'clients are'} next in turn")
    explained = planner.policy.explain(sequence.group.request, planner.waiting.first.group.request)
    return f"{' and '.join(parts)} ({explained})"
