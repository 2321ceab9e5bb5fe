"""Which replica takes a request: in turn, by load, or by what its KV cache holds, within a bound on its load.

`replicas` asks it, a simulation plays it, and a property test drives it. It does no I/O and looks at no clock:
the same calls give the same choices. What a replica holds is known from what was sent there, which is remembered as an
engine would: the blocks used last, as many as it has. How a block is named is the caller's affair.
"""

import math
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

_MOST_REMEMBERED = 1 << 17  # blocks of a replica, about 30 MiB

RouterPolicy = Literal["cache_aware", "least_loaded", "round_robin"]


@dataclass(frozen=True)
class RouterOptions:
    """How requests are spread.

    Attributes:
        policy: "cache_aware": whoever holds the longest part of the prompt, and of those the least loaded.
        load_bound: >= 1; who has more than so many times the mean load (rounded up, the request counted in) is passed
            over, as in "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup and Zadimoghaddam, 2016).
        load_slack: a load up to which nobody is passed over: a small batch takes one more at little cost.
    """

    policy: RouterPolicy = "cache_aware"
    load_bound: float = 1.5
    load_slack: int = 3


class Router:
    """Chooses among replicas, which are numbered from 0.

    Attributes:
        loads: requests that each has and has not finished.
        is_open: whether each may be chosen.
    """

    def __init__(self, options: RouterOptions, num_blocks: Sequence[int]) -> None:
        """`num_blocks`: blocks in each replica's KV cache."""
        self.loads, self.is_open = [0] * len(num_blocks), [True] * len(num_blocks)
        self._options, self._sizes = options, [min(count, _MOST_REMEMBERED) for count in num_blocks]
        self._held: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in num_blocks]  # the last used at the end
        self._turn = 0

    @property
    def uses_names(self) -> bool:
        """Whether the names of blocks make a difference."""
        return self._options.policy == "cache_aware"

    def choose(self, names: Sequence[bytes] = ()) -> int | None:
        """The replica for a prompt, whose load grows by one; None where none is open.

        Args:
            names: of the prompt's full blocks in order, each standing for all that precedes it too.
        """
        candidates = [replica for replica, is_open in enumerate(self.is_open) if is_open]
        if not candidates:
            return None
        num_found = loads = [0] * len(self.loads)
        if self._options.policy != "round_robin":
            loads, bound = self.loads, self._bound(candidates)
            candidates = [replica for replica in candidates if loads[replica] < bound]
        if self.uses_names:
            num_found = [_num_held(names, held) for held in self._held]
        size, turn = len(loads), self._turn
        chosen = min(candidates, key=lambda replica: (-num_found[replica], loads[replica], (replica - turn) % size))
        self._turn = chosen + 1
        self.loads[chosen] += 1
        if self.uses_names:
            self._remember(chosen, names)
        return chosen

    def finish(self, replica: int) -> None:
        """One of a replica's requests has ended."""
        self.loads[replica] -= 1

    def forget(self, replica: int) -> None:
        """A replica's KV cache is empty."""
        self._held[replica].clear()

    def _bound(self, candidates: list[int]) -> int:
        """The load that none of these may exceed; the least loaded one never does with one more."""
        total = sum(self.loads[replica] for replica in candidates) + 1
        most = min(total, self._options.load_bound * total / len(candidates))
        return max(self._options.load_slack, math.ceil(most))

    def _remember(self, replica: int, names: Sequence[bytes]) -> None:
        held, size = self._held[replica], self._sizes[replica]
        for name in reversed(names[:size]):  # the beginning last: a block is of no use without those before it
            held[name] = None
            held.move_to_end(name)
        while len(held) > size:
            held.popitem(last=False)


def _num_held(names: Sequence[bytes], held: Container[bytes]) -> int:
    """How many of a prompt's first blocks are held: to look them up takes a fraction of what their names took."""
    return next((index for index, name in enumerate(names) if name not in held), len(names))
