"""Which of several models are in memory: who is loaded, who makes room, and which requests wait, in what order.

`quire.entrypoints.server.fleet` tells it what has happened, and does what it says. It is pure bookkeeping, on a clock
that it is given: it knows names, sizes and tickets, and nothing of engines, processes or HTTP.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["unloaded", "loading", "ready", "unloading"]

PATIENCE = 5.0  # seconds after which who waits for room is let in before newcomers to the model that is to make room


@dataclass(frozen=True)
class Limits:
    """What the models share. `keep_alive`: idle seconds after which one is unloaded, negative for never."""

    max_loaded: int
    memory: float = math.inf  # bytes, in the unit of the models' sizes
    keep_alive: float = 300.0
    max_wait: float = 60.0  # seconds for room


@dataclass(eq=False)
class Ticket:
    """A request's claim on a model: it waits until it is granted, refused (no room in time) or failed (to load)."""

    model: str
    since: float
    verdict: Literal["waiting", "granted", "refused", "failed"] = "waiting"


@dataclass
class Orders:
    """What follows from an event: models to load and to unload, and tickets whose verdict has changed."""

    load: list[str] = field(default_factory=list)
    unload: list[str] = field(default_factory=list)
    decided: list[Ticket] = field(default_factory=list)


@dataclass
class Model:
    """Where a model is; `fleet` may set its size, once it has become known."""

    size: int
    state: State = "unloaded"
    users: set[Ticket] = field(default_factory=set[Ticket])  # of requests that have it, and of jobs that outlive them
    begun: float = 0.0  # when the last one was granted it
    left: float = 0.0  # when the last one let go


class LoadPolicy:
    """Every event gives orders, which are to be carried out, and told when they are done (`loaded`, `unloaded`)."""

    def __init__(self, sizes: Mapping[str, int], limits: Limits) -> None:
        """`sizes`: what each model takes while it is loaded."""
        self.limits = limits
        self.waiting: list[Ticket] = []  # in order of arrival
        self.models = {name: Model(size) for name, size in sizes.items()}

    # Events.

    def ask(self, name: str, now: float) -> tuple[Ticket, Orders]:
        """A request comes; its ticket is granted at once where the model is ready."""
        ticket = Ticket(name, now)
        self.waiting.append(ticket)
        return ticket, self.advance(now)

    def leave(self, ticket: Ticket, now: float) -> Orders:
        """A request has ended, or waits no longer. A second time, or after the model's death, it counts for nothing."""
        model = self.models[ticket.model]
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        elif ticket in model.users:
            model.users.remove(ticket)
            model.left = now
        return self.advance(now)

    def share(self, name: str) -> Ticket:
        """A ticket for work that outlives the request which began it, and which still has the model."""
        ticket = Ticket(name, 0.0, "granted")
        self.models[name].users.add(ticket)
        return ticket

    def loaded(self, name: str, now: float) -> Orders:
        """A model is ready."""
        model = self.models[name]
        model.state, model.left, model.begun = "ready", now, now
        return self.advance(now)

    def failed(self, name: str, now: float) -> Orders:
        """A model does not load: all who wait for it have failed, and the next one tries again."""
        self.models[name].state = "unloaded"
        failed = [ticket for ticket in self.waiting if ticket.model == name]
        self.waiting = [ticket for ticket in self.waiting if ticket.model != name]
        for ticket in failed:
            ticket.verdict = "failed"
        orders = self.advance(now)
        orders.decided += failed
        return orders

    def died(self, name: str, now: float) -> Orders:
        """A model's engine is dead: it is being unloaded, whoever has it."""
        model = self.models[name]
        model.state = "unloading"
        model.users.clear()
        return self.advance(now)

    def unloaded(self, name: str, now: float) -> Orders:
        """A model's memory is free."""
        self.models[name].state = "unloaded"
        return self.advance(now)

    def advance(self, now: float) -> Orders:
        """What the time brings: called at every event, and now and again."""
        orders = Orders()
        head: Ticket | None = None  # the first one that waits for room: it comes before all that need some
        held: str | None = None
        for ticket in list(self.waiting):
            model = self.models[ticket.model]
            if model.state == "ready" and ticket.model != held:
                model.users.add(ticket)
                model.begun = now
                self._decide(ticket, "granted", orders)
            elif model.state != "loading" and now - ticket.since >= self.limits.max_wait:
                self._decide(ticket, "refused", orders)
            elif model.state == "unloaded" and head is None and not self._try(ticket.model, orders):
                head = ticket
                held = self._held() if now - ticket.since >= PATIENCE else None
        if self.limits.keep_alive >= 0:
            for name, model in self.models.items():
                if self._is_idle(name) and now - model.left >= self.limits.keep_alive:
                    self._unload(name, orders)
        return orders

    # Room.

    def _try(self, name: str, orders: Orders) -> bool:
        """Load a model if there is room, or else make some; False: it has to wait, and all after it."""
        while not self._fits(name, ("loading", "ready")):
            idle = [other for other in self.models if self._is_idle(other)]
            if not idle:
                return False
            self._unload(min(idle, key=lambda other: self.models[other].left), orders)
        if not self._fits(name, ("loading", "ready", "unloading")):
            return False  # until those are gone
        self.models[name].state = "loading"
        orders.load.append(name)
        return True

    def _fits(self, name: str, states: tuple[State, ...]) -> bool:
        there = [model.size for model in self.models.values() if model.state in states]
        memory = sum(there) + self.models[name].size
        return len(there) < self.limits.max_loaded and (memory <= self.limits.memory or not there)

    def _held(self) -> str | None:
        """The model to which newcomers are not let in: it is to make room, and would have work for ever."""
        ready = [name for name, model in self.models.items() if model.state == "ready"]
        return min(ready, key=lambda name: self.models[name].begun, default=None)

    def _is_idle(self, name: str) -> bool:
        return self.models[name].state == "ready" and not self.models[name].users

    def _unload(self, name: str, orders: Orders) -> None:
        self.models[name].state = "unloading"
        orders.unload.append(name)

    def _decide(self, ticket: Ticket, verdict: Literal["granted", "refused"], orders: Orders) -> None:
        self.waiting.remove(ticket)
        ticket.verdict = verdict
        orders.decided.append(ticket)
