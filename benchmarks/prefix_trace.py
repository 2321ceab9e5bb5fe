"""The prefix cache under a trace: hit rates against the ideal, and what the scheduler costs a scheduled token.

    python benchmarks/prefix_trace.py ../shared/data/traces/mooncake_synthetic.jsonl [--blocks 1000 4000 ...]

The trace (Mooncake's) names each 512-token block of a prompt by a hash id. Each is played as one KV block of so many
tokens that follow from its id, through the real scheduler and KV manager; nothing is computed. Time is the trace's own:
a step takes its tokens at a fixed rate. What is found is counted in tokens, and compared with a pool of no end.
"""

import argparse
import gc
import heapq
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.scheduler import SchedulerConfig
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import SequenceResult, StepPlan, StepResult
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler

HASH_TOKENS = 512  # of a hash id in the trace
BUDGET = 8_192  # tokens of a step
TOKENS_PER_SECOND = 200_000.0  # of the imagined machine
SECONDS_PER_STEP = 0.01  # at least


class Item(NamedTuple):
    """A request of the trace."""

    arrival: float  # seconds
    num_tokens: int
    max_tokens: int
    hash_ids: list[int]

    @property
    def full_blocks(self) -> list[int]:
        """Those of its blocks that can be shared."""
        return self.hash_ids[: self.num_tokens // HASH_TOKENS]

    @property
    def most_found(self) -> int:
        """Blocks that can be found at most: the last token is always computed."""
        return (self.num_tokens - 1) // HASH_TOKENS


class Outcome(NamedTuple):
    """What a pool of some size made of the trace."""

    num_prompt_tokens: int
    num_hit_tokens: int
    num_scheduled_tokens: int
    num_steps: int
    seconds: float  # of processor time in the scheduler
    num_preemptions: int
    num_evictions: int


def read_trace(path: Path, limit: int) -> list[Item]:
    """The first requests of a trace."""
    items = []
    for line in path.read_text().splitlines()[:limit]:
        entry: dict[str, Any] = json.loads(line)
        arrival, num_output = entry["timestamp"] / 1000, max(entry["output_length"], 1)
        items.append(Item(arrival, entry["input_length"], num_output, entry["hash_ids"]))
    return items


def ideal_hits(items: Sequence[Item]) -> int:
    """Tokens that a pool without end would have: of whole blocks, all but a prompt's last token at most."""
    seen: set[int] = set()
    hits = 0
    for item in items:
        found = 0
        while found < item.most_found and item.hash_ids[found] in seen:
            found += 1
        seen.update(item.full_blocks)
        hits += found * HASH_TOKENS
    return hits


def optimal_hits(items: Sequence[Item], num_blocks: int) -> int:
    """Tokens that a cache of so many blocks would have, were the block evicted that is needed last (Belady).

    One request after the other, whose own blocks count among them: what no order of eviction can beat by much.
    """
    uses: dict[int, list[int]] = {}
    for place, item in enumerate(items):
        for block in item.full_blocks:
            uses.setdefault(block, []).append(place)
    following = {block: iter(places) for block, places in uses.items()}
    next_use: dict[int, float] = {}
    heap: list[tuple[float, int]] = []
    hits = 0
    for place, item in enumerate(items):
        blocks, found = item.full_blocks, 0
        while found < item.most_found and blocks[found] in next_use:
            found += 1
        hits += found * HASH_TOKENS
        for block in blocks:
            use = next((later for later in following[block] if later > place), float("inf"))
            next_use[block] = use
            heapq.heappush(heap, (-use, block))
        while len(next_use) > num_blocks:
            use, block = heapq.heappop(heap)
            if next_use.get(block) == -use:
                del next_use[block]
    return hits


def play(items: Sequence[Item], num_blocks: int) -> Outcome:
    """Run the trace through a scheduler with so many KV blocks of 512 tokens."""
    longest = max(item.num_tokens + item.max_tokens for item in items) + 1
    layout = CacheLayout(
        block_size=HASH_TOKENS, groups=[CacheGroup([0])], num_blocks=[num_blocks], max_model_len=longest
    )
    config = SchedulerConfig(max_model_len=longest, max_num_seqs=256, max_num_batched_tokens=BUDGET)
    scheduler = Scheduler(config, KVManager(layout))
    clock, now, spent, place = time.thread_time, 0.0, 0.0, 0
    num_steps = num_tokens = 0
    while place < len(items) or scheduler.has_unfinished():
        if not scheduler.has_unfinished():
            now = max(now, items[place].arrival)
        coming = []
        while place < len(items) and items[place].arrival <= now:
            coming.append(_request(place, items[place], now))
            place += 1
        start = clock()
        for request in coming:
            scheduler.add(request, now)
        plan = scheduler.schedule(now)
        spent += clock() - start
        if plan is None:
            continue
        now += max(plan.num_tokens / TOKENS_PER_SECOND, SECONDS_PER_STEP)
        result = _results_of(plan)
        start = clock()
        scheduler.update(plan, result, now)
        spent += clock() - start
        num_steps += 1
        num_tokens += plan.num_tokens
    stats = scheduler.stats()
    return Outcome(
        num_prompt_tokens=stats.prefix_cache_queries_total,
        num_hit_tokens=stats.prefix_cache_hits_total,
        num_scheduled_tokens=num_tokens,
        num_steps=num_steps,
        seconds=spent,
        num_preemptions=stats.num_preemptions_total,
        num_evictions=stats.prefix_cache_evictions_total,
    )


def _request(place: int, item: Item, now: float) -> NewRequest:
    params = SamplingParams(max_tokens=item.max_tokens)
    task = SamplingTask(
        params=params, max_tokens=item.max_tokens, stop_token_ids=frozenset(), eos_token_id=None, seed=place
    )
    # A block's tokens are its id, again and again: different ids share nothing.
    token_ids = [number for number in item.hash_ids for _ in range(HASH_TOKENS)][: item.num_tokens]
    return NewRequest(request_id=str(place), prompt_token_ids=token_ids, task=task, arrival_time=now)


def _results_of(plan: StepPlan) -> StepResult:
    results = [
        SequenceResult([-1 - item.sequence_id]) if item.sampling else SequenceResult() for item in plan.scheduled
    ]
    return StepResult(step_id=plan.step_id, results=results)


def main() -> None:
    """Print a row for each size of the pool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[500, 1_000, 2_000, 4_000, 8_000, 16_000, 64_000])
    parser.add_argument("--limit", type=int, default=10**9, help="requests to play")
    args = parser.parse_args()
    items = read_trace(args.trace, args.limit)
    total = sum(item.num_tokens for item in items)
    ideal = ideal_hits(items) / total
    print(f"{len(items):,} requests, {total:,} prompt tokens; a pool without end would find {ideal:.1%} of them")
    print("blocks   hit rate  of the ideal  Belady  evictions  preemptions  steps  ns a scheduled token  us a step")
    for num_blocks in args.blocks:
        gc.collect()
        outcome = play(items, num_blocks)
        rate = outcome.num_hit_tokens / outcome.num_prompt_tokens
        belady = optimal_hits(items, num_blocks) / total
        print(
            f"{num_blocks:6,} {rate:9.1%} {rate / ideal:12.1%} {belady:8.1%} {outcome.num_evictions:10,} "
            f"{outcome.num_preemptions:11,} {outcome.num_steps:8,} "
            f"{outcome.seconds / outcome.num_scheduled_tokens * 1e9:12.1f} "
            f"{outcome.seconds / outcome.num_steps * 1e6:16.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
