"""The router of data-parallel replicas under a trace: hit rates against the ideal, and how even the load is.

    python benchmarks/routing.py ../shared/data/traces/mooncake_synthetic.jsonl [--replicas 64] [--speed 1 4 16]

The trace (Mooncake's) names each 512-token block of a prompt by a hash id. Each request goes where the router sends it,
takes the time of its uncached tokens and of its output there, and leaves its blocks in that replica's cache, which
evicts those used longest ago. The ideal is one cache without end, which all would share. `--speed` plays the trace so
many times as fast: more requests at once. Nothing is computed.
"""

import argparse
import heapq
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from prefix_trace import HASH_TOKENS, Item, ideal_hits, read_trace

from quire.entrypoints.server.router import Router, RouterOptions, RouterPolicy

PREFILL_SECONDS = 1 / 10_000  # of a token
DECODE_SECONDS = 0.03  # of a token


class Outcome(NamedTuple):
    """What a way to route made of a trace."""

    num_hit_tokens: int
    num_most: int  # requests that a replica had at once, at most
    num_over: int  # requests that made their replica's load more than twice the mean, and more than the slack
    waits: list[float]  # seconds of prefill, queueing included
    microseconds: float  # of the router for a request


def play(items: Sequence[Item], num_replicas: int, num_blocks: int, options: RouterOptions, speed: float) -> Outcome:
    """Route a trace to replicas of so many blocks each."""
    router = Router(options, [num_blocks] * num_replicas)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
    free_at = [0.0] * num_replicas  # when each has done the prefills that it has
    running: list[tuple[float, int]] = []  # ends of requests
    waits: list[float] = []
    hits = most = over = 0
    spent = 0.0
    for item in items:
        now = item.arrival / speed
        while running and running[0][0] <= now:
            router.finish(heapq.heappop(running)[1])
        names = [number.to_bytes(8, "big") for number in item.full_blocks]
        start = time.perf_counter()
        chosen = router.choose(names)
        spent += time.perf_counter() - start
        assert chosen is not None
        mean = sum(router.loads) / num_replicas
        over += router.loads[chosen] > max(options.load_slack, 2 * mean)
        most = max(most, router.loads[chosen])
        found = _use(caches[chosen], item, num_blocks)
        hits += found * HASH_TOKENS
        begin = max(now, free_at[chosen])
        free_at[chosen] = begin + (item.num_tokens - found * HASH_TOKENS) * PREFILL_SECONDS
        waits.append(free_at[chosen] - now)
        heapq.heappush(running, (free_at[chosen] + item.max_tokens * DECODE_SECONDS, chosen))
    return Outcome(hits, most, over, sorted(waits), spent / len(items) * 1e6)


def _use(cache: OrderedDict[int, None], item: Item, num_blocks: int) -> int:
    """Blocks of a prompt that a cache has; it has all of them afterwards."""
    found = 0
    while found < item.most_found and item.hash_ids[found] in cache:
        found += 1
    for block in reversed(item.full_blocks):
        cache[block] = None
        cache.move_to_end(block)
    while len(cache) > num_blocks:
        cache.popitem(last=False)
    return found


def main() -> None:
    """Print a row for each speed and way to route."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2_000, help="KV blocks of 512 tokens in each replica")
    parser.add_argument("--speed", type=float, nargs="+", default=[1.0, 4.0, 16.0])
    parser.add_argument("--bounds", type=float, nargs="+", default=[1.0, 1.25, 1.5, 2.0, float("inf")])
    parser.add_argument("--limit", type=int, default=10**9, help="requests to play")
    args = parser.parse_args()
    items = read_trace(args.trace, args.limit)
    total = sum(item.num_tokens for item in items)
    ideal = ideal_hits(items)
    print(f"{len(items):,} requests, {total:,} prompt tokens; one cache without end would find {ideal / total:.1%}")
    print("speed  policy        bound  hit rate  of the ideal  most at once  overloaded  first token p50, p99  us")
    for speed in args.speed:
        for policy in get_args(RouterPolicy):
            for bound in args.bounds if policy == "cache_aware" else [RouterOptions.load_bound]:
                outcome = play(items, args.replicas, args.blocks, RouterOptions(policy, bound), speed)
                rate = outcome.num_hit_tokens / total
                p50, p99 = (outcome.waits[int(len(items) * share)] for share in (0.5, 0.99))
                print(
                    f"{speed:5g}  {policy:12}  {bound:5g} {rate:9.1%} {rate / (ideal / total):13.1%} "
                    f"{outcome.num_most:13,} {outcome.num_over / len(items):11.1%} {p50:10.2f} s {p99:7.2f} s "
                    f"{outcome.microseconds:5.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
