"""Which of several models are loaded: on a fake clock, without engines."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.server.loading import PATIENCE, Limits, LoadPolicy, Orders, Ticket

SIZES = {"a": 4, "b": 4, "c": 4, "big": 10}


def policy_of(**limits: float) -> LoadPolicy:
    return LoadPolicy(SIZES, Limits(**{"max_loaded": 2, "memory": 10, "keep_alive": 100.0, **limits}))  # type: ignore[arg-type]


def load(policy: LoadPolicy, name: str, now: float) -> Ticket:
    """A request that loads a model, and has it."""
    ticket, orders = policy.ask(name, now)
    assert orders.load == [name]
    assert policy.loaded(name, now).decided == [ticket]
    return ticket


def test_requests_for_one_model_start_one_load() -> None:
    policy = policy_of()
    first, orders = policy.ask("a", 0)
    second, more = policy.ask("a", 0)
    assert (orders.load, more.load) == (["a"], [])
    assert policy.loaded("a", 1).decided == [first, second]
    third, _ = policy.ask("a", 1)
    assert [t.verdict for t in (first, second, third)] == ["granted"] * 3


def test_the_one_unused_for_longest_makes_room_and_never_one_with_work() -> None:
    policy = policy_of()
    a, b = load(policy, "a", 0), load(policy, "b", 1)
    policy.leave(b, 2)
    policy.leave(a, 3)
    again, _ = policy.ask("b", 4)
    c, orders = policy.ask("c", 5)
    assert (orders.unload, orders.load, policy.models["a"].state) == (["a"], [], "unloading")
    assert policy.unloaded("a", 6).load == ["c"]
    assert policy.loaded("c", 7).decided == [c]
    _, orders = policy.ask("a", 8)
    assert orders == Orders()  # both have work
    policy.leave(again, 9)
    assert policy.models["b"].state == "unloading"


def test_memory_makes_room_too() -> None:
    policy = policy_of(max_loaded=4)
    a, b = load(policy, "a", 0), load(policy, "b", 0)
    policy.leave(a, 1)
    _, orders = policy.ask("big", 2)
    assert orders.unload == ["a"]
    assert policy.unloaded("a", 3) == Orders()  # b is still there, and at work
    assert policy.leave(b, 4).unload == ["b"]
    assert policy.unloaded("b", 5).load == ["big"]


def test_what_has_become_known_of_a_size_counts_from_then_on() -> None:
    policy = policy_of(max_loaded=4)
    policy.leave(load(policy, "a", 0), 1)
    policy.models["big"].size = 6
    _, orders = policy.ask("big", 2)
    assert (orders.unload, orders.load) == ([], ["big"])


@pytest.mark.parametrize(("seconds", "left", "kept"), [(10.0, 9.9, 10.1), (0.0, 0.0, 0.0), (-1.0, 1e9, 1e9)])
def test_keep_alive(seconds: float, left: float, kept: float) -> None:
    policy = policy_of(keep_alive=seconds)
    ticket = load(policy, "a", 0)
    assert policy.advance(1000).unload == []  # it has work
    idle = policy.leave(ticket, 0)
    assert idle.unload == (["a"] if seconds == 0 else [])
    if seconds > 0:
        assert policy.advance(left).unload == []
        assert policy.advance(kept).unload == ["a"]
    if seconds < 0:
        assert policy.advance(left).unload == []


def test_who_waits_for_room_is_refused_after_a_while_and_loading_is_no_such_wait() -> None:
    policy = policy_of(max_loaded=1, max_wait=60)
    a = load(policy, "a", 0)
    b, _ = policy.ask("b", 10)
    assert policy.advance(69).decided == []
    assert policy.advance(70).decided == [b]
    assert b.verdict == "refused"
    b, _ = policy.ask("b", 80)
    policy.leave(a, 81)
    policy.unloaded("a", 82)
    assert policy.advance(1000).decided == []
    assert policy.loaded("b", 1000).decided == [b]


def test_a_stream_of_work_keeps_no_other_model_out() -> None:
    policy = policy_of(max_loaded=1)
    first = load(policy, "a", 0)
    policy.ask("b", 1)
    second, _ = policy.ask("a", PATIENCE)
    assert second.verdict == "granted"  # others go on for a while
    third, _ = policy.ask("a", 1 + PATIENCE)
    assert third.verdict == "waiting"
    policy.leave(first, 7)
    assert policy.leave(second, 8).unload == ["a"]
    assert policy.unloaded("a", 9).load == ["b"]


def test_they_wait_in_order() -> None:
    policy = policy_of(max_loaded=1)
    a = load(policy, "a", 0)
    b, _ = policy.ask("b", 1)
    c, _ = policy.ask("c", 2)
    policy.leave(a, 3)
    assert policy.unloaded("a", 3).load == ["b"]
    assert policy.loaded("b", 4).decided == [b]
    assert policy.leave(b, 5).unload == ["b"]
    assert policy.unloaded("b", 6).load == ["c"]
    assert policy.loaded("c", 7).decided == [c]


def test_a_load_that_fails_is_told_to_all_who_wait_for_it_and_tried_again() -> None:
    policy = policy_of(max_loaded=1)
    first, _ = policy.ask("a", 0)
    second, _ = policy.ask("a", 0)
    other, _ = policy.ask("b", 0)
    orders = policy.failed("a", 1)
    assert (first.verdict, second.verdict, other.verdict) == ("failed", "failed", "waiting")
    assert orders.load == ["b"]
    assert set(orders.decided) == {first, second}


def test_death_and_birth_again_while_the_first_requests_still_end() -> None:
    policy = policy_of()
    old = load(policy, "a", 0)
    job = policy.share("a")
    assert len(policy.models["a"].users) == 2
    policy.died("a", 1)
    policy.ask("a", 1)
    assert policy.unloaded("a", 2).load == ["a"]
    policy.loaded("a", 3)
    policy.leave(old, 4)
    policy.leave(job, 4)
    assert len(policy.models["a"].users) == 1


def test_who_leaves_while_waiting_is_forgotten() -> None:
    policy = policy_of(max_loaded=1)
    load(policy, "a", 0)
    b, _ = policy.ask("b", 1)
    policy.leave(b, 2)
    assert policy.waiting == []
    policy.leave(b, 2)
    assert len(policy.models["b"].users) == 0


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "leave", "done", "fail", "die", "wait"]), st.integers(0, 9)), max_size=60
)


@settings(max_examples=80, deadline=None)
@given(events=EVENTS, keep_alive=st.sampled_from([-1.0, 0.0, 8.0]), max_loaded=st.integers(1, 3))
def test_any_sequence_of_events(events: list[tuple[str, int]], keep_alive: float, max_loaded: int) -> None:
    """No limit is passed, nothing with work is unloaded, nobody is forgotten, and at the end all are served."""
    policy = policy_of(max_loaded=max_loaded, keep_alive=keep_alive, max_wait=30)
    tickets: list[Ticket] = []
    todo: deque[tuple[str, str]] = deque()  # what is being loaded and unloaded
    now = 0.0

    def take(orders: Orders) -> None:
        for name in orders.unload:
            assert not policy.models[name].users
        todo.extend([("load", name) for name in orders.load] + [("unload", name) for name in orders.unload])
        there = [name for name in SIZES if policy.models[name].state != "unloaded"]
        assert len(there) <= max_loaded
        assert sum(SIZES[name] for name in there) <= 10
        assert sorted(name for _, name in todo) == sorted(n for n in SIZES if policy.models[n].state.endswith("ing"))
        for name in SIZES:
            granted = [t for t in tickets if t.model == name and t.verdict == "granted"]
            assert policy.models[name].state != "ready" or policy.models[name].users <= {*granted}
        assert all(ticket in tickets and ticket.verdict == "waiting" for ticket in policy.waiting)

    def finish() -> None:
        kind, name = todo.popleft()
        take(policy.loaded(name, now) if kind == "load" else policy.unloaded(name, now))

    for kind, number in events:
        now += 0.5
        if kind == "ask":
            ticket, orders = policy.ask(list(SIZES)[number % len(SIZES)], now)
            tickets.append(ticket)
            take(orders)
        elif kind == "leave" and tickets:
            take(policy.leave(tickets.pop(number % len(tickets)), now))
        elif kind == "done" and todo:
            finish()
        elif kind == "fail" and todo and todo[0][0] == "load":
            take(policy.failed(todo.popleft()[1], now))
        elif kind == "die" and (ready := [name for name in SIZES if policy.models[name].state == "ready"]):
            todo.append(("unload", name := ready[number % len(ready)]))
            take(policy.died(name, now))
        else:
            now += number
            take(policy.advance(now))
    while todo or tickets:
        now += 0.1
        take(policy.advance(now))
        if todo:
            finish()
        elif granted := [ticket for ticket in tickets if ticket.verdict != "waiting"]:
            tickets.remove(granted[0])
            take(policy.leave(granted[0], now))
        assert now < 600, "somebody waits for ever"
    assert policy.waiting == []
