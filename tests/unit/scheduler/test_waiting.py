"""Lanes that take turns by rank: whatever is added, removed or ranked anew, the order is that of a plain sort."""

import random
from types import SimpleNamespace
from typing import Any

from quire.scheduler.waiting import WaitingQueue


def test_the_order_is_that_of_a_sort() -> None:
    rng = random.Random(2)
    ranks: dict[str | None, float] = dict.fromkeys(("a", "b", "c", None), 0.0)
    queue = WaitingQueue(lambda lane: ranks[lane])
    held: list[Any] = []
    for number in range(3000):
        if held and rng.random() < 0.45:
            gone = held.pop(rng.randrange(len(held)))
            queue.remove(gone)
        elif rng.random() < 0.3:
            lane = rng.choice(list(ranks))
            ranks[lane] += rng.randrange(4)
            queue.reorder(lane)
        else:
            lane = rng.choice(list(ranks))
            new: Any = SimpleNamespace(group=SimpleNamespace(lane=lane), key=(rng.randrange(50), number, 0))
            queue.add(new)
            held.append(new)
        first = {lane: min((s.key for s in held if s.group.lane == lane), default=()) for lane in ranks}
        wanted = sorted(held, key=lambda s: (ranks[s.group.lane], first[s.group.lane], s.key))
        assert [*queue] == wanted
        assert len(queue) == len(held)
        if held:
            assert queue.first is wanted[0]
            assert queue.lowest_rank == ranks[wanted[0].group.lane]
            last = wanted[-1]
            lanes = {s.group.lane for s in wanted} - {last.group.lane}
            assert queue.place(last) == (len(lanes), sum(s.group.lane == last.group.lane for s in wanted) - 1)
        assert all(queue.has(lane) == any(s.group.lane == lane for s in held) for lane in ranks)
