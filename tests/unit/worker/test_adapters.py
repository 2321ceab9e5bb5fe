"""Adapters of a worker: what is loaded for nobody is not kept."""

import threading
from types import SimpleNamespace
from typing import Any

from quire.lora.slots import Packed
from quire.protocol.requests import AdapterRef
from quire.protocol.worker import PlaceAdapters
from quire.worker.adapters import Adapters


class Held(Adapters):
    """Whose files come once they may; those of odd numbers are broken."""

    def __init__(self, max_held: int) -> None:
        self.put: list[int] = []
        model: Any = SimpleNamespace(lora=SimpleNamespace(put=lambda slot, packed: self.put.append(slot)))
        super().__init__(model, max_held)
        self.go_on, self.num_read = threading.Event(), 0

    def _load(self, ref: AdapterRef) -> Packed:
        self.num_read += 1
        assert self.go_on.wait(60)
        if ref.adapter_id % 2:
            raise OSError("broken")
        return {}


def place(adapters: Adapters, *own: int, seconds: float = 60.0) -> tuple[list[int], list[int]]:
    wanted = [(slot, AdapterRef(each, b"")) for slot, each in enumerate(own)]
    reply = adapters.place(PlaceAdapters(wanted, seconds))
    return reply.ready, [each for each, _ in reply.failed]


def test_what_nobody_awaits_any_more_is_not_kept() -> None:
    """As where clients leave while their adapters are read, and others have their places."""
    adapters = Held(max_held=1)
    for own in range(1, 30):
        assert place(adapters, own, seconds=0.0) == ([], [])
    adapters.go_on.set()
    assert place(adapters, 30) == ([30], [])
    assert place(adapters, 32) == ([32], [])
    assert adapters.num_read <= 3, "the first, which was begun, and those that were awaited"
    assert len(adapters._held) + len(adapters._loading) <= 2
    adapters.close()


def test_a_failure_is_told_once_to_those_who_await_it() -> None:
    adapters = Held(max_held=1)
    adapters.go_on.set()
    assert place(adapters, 1, 2) == ([2], [1])
    assert place(adapters, 1, 2) == ([2], [1])
    assert adapters.num_read == 3, "it is read anew"
    adapters.close()
