"""Which adapter has which place on the workers, which requests run with it, and who waits for one.

The engine core keeps it. A place whose adapter no live request uses goes to whoever waits for one, first the place
unused for longest. Knows requests and adapters by their ids.
"""

from collections.abc import Callable, Collection, Iterable

from quire.protocol.requests import AdapterRef

_MOST_PASSES = 32  # requests that find their adapter in its place, in a row, while others wait for a place


class AdapterPlaces:
    """So many places.

    Args:
        is_live: whether a request still runs, or waits.

    Attributes:
        loading: adapters that are to be in their places, and are not yet.
        awaiting: requests that wait, in order.
    """

    def __init__(self, num_places: int, is_live: Callable[[str], bool]) -> None:
        self.num_places, self._is_live = num_places, is_live
        self._free = [*range(num_places)]
        self._places: dict[int, int] = {}  # adapter -> its place; the one unused for longest first
        self._users: dict[int, set[str]] = {}  # adapter in a place -> requests that run with it, or did
        self.loading: dict[int, AdapterRef] = {}
        self.awaiting: dict[str, AdapterRef] = {}
        self._num_passes = 0

    @property
    def wanted(self) -> list[tuple[int, AdapterRef]]:
        """Adapters to be loaded, and the place of each."""
        return [(self._places[own], ref) for own, ref in self.loading.items()]

    def add(self, request_id: str, ref: AdapterRef | None) -> None:
        """A request has come; `take` says when it may go on, if it is to run with an adapter."""
        self.awaiting.pop(request_id, None)  # an earlier one that had its id, and has ended
        for users in self._users.values():
            users.discard(request_id)
        if ref is not None:
            self.awaiting[request_id] = ref

    def take(self, ready: Iterable[int] = (), failed: Collection[int] = ()) -> tuple[list[str], list[str]]:
        """What became of adapters that were wanted; returns the requests that go on now, and those that never will."""
        for own in [own for own in failed if own in self._places]:
            self._free.append(self._drop(own))
        for own in ready:
            self.loading.pop(own, None)
        self.awaiting = {name: ref for name, ref in self.awaiting.items() if self._is_live(name)}
        self._users = {own: set(filter(self._is_live, users)) for own, users in self._users.items()}
        lost = [name for name, ref in self.awaiting.items() if ref.adapter_id in failed]
        for name in lost:
            del self.awaiting[name]
        found: list[str] = []
        passes = False
        for name, ref in self.awaiting.items():
            own = ref.adapter_id
            if own not in self._places and not self._assign(ref):
                if self._num_passes >= _MOST_PASSES:
                    break
                passes = True
            elif own not in self.loading:
                found.append(name)
                self._users[own].add(name)
                self._places[own] = self._places.pop(own)
                self._num_passes += passes
        for name in found:
            del self.awaiting[name]
        return found, lost

    def _assign(self, ref: AdapterRef) -> bool:
        """Whether there is a place for an adapter; then it is to be loaded."""
        if not self._free:
            wanted = {ref.adapter_id for ref in self.awaiting.values() if self._num_passes < _MOST_PASSES}
            unused = [own for own in self._places if own not in wanted and not self._users[own]]
            if not unused:
                return False
            self._free.append(self._drop(unused[0]))
        self._places[ref.adapter_id] = self._free.pop()
        self._users[ref.adapter_id] = set()
        self.loading[ref.adapter_id] = ref
        self._num_passes = 0
        return True

    def _drop(self, own: int) -> int:
        self.loading.pop(own, None)
        del self._users[own]
        return self._places.pop(own)
