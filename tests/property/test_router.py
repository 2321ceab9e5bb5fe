"""The router under any order of events: what it may never do, whatever was sent, finished, lost and brought back."""

import math
from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.entrypoints.server.router import Router, RouterOptions

PROMPTS = [
    tuple(prompt[: i + 1].encode() for i in range(len(prompt))) for prompt in ("", "abcd", "abxy", "abcdefgh", "q")
]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("choose"), st.integers(0, len(PROMPTS) - 1)),
        st.tuples(st.sampled_from(["finish", "close", "open", "forget"]), st.integers(0, 3)),
    ),
    max_size=60,
)
OPTIONS = st.builds(
    RouterOptions,
    st.sampled_from(["cache_aware", "least_loaded", "round_robin"]),
    st.sampled_from([1.0, 1.25, 2.0, float("inf")]),
    st.integers(0, 3),
)


def play(options: RouterOptions, events: list[tuple[str, int]], num_blocks: int = 5) -> list[int | None]:
    """Carry events out on four replicas, checking each choice; returns the choices."""
    router = Router(options, [num_blocks] * 4)
    held: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(4)]  # what each must be known to hold
    chosen: list[int | None] = []
    for event, number in events:
        if event == "choose":
            names = PROMPTS[number]
            before = list(router.loads)
            replica = router.choose(names)
            chosen.append(replica)
            is_open = [r for r in range(4) if router.is_open[r]]
            if not is_open:
                assert replica is None
                continue
            assert replica in is_open
            check(options, names, before, held, is_open, replica)
            assert router.loads[replica] == before[replica] + 1
            for name in reversed(names[:num_blocks]):
                held[replica][name] = None
                held[replica].move_to_end(name)
            while len(held[replica]) > num_blocks:
                held[replica].popitem(last=False)
        elif event == "finish" and router.loads[number]:
            router.finish(number)
        elif event in ("close", "open"):
            router.is_open[number] = event == "open"
        elif event == "forget":
            router.forget(number)
            held[number].clear()
    return chosen


def check(
    options: RouterOptions,
    names: tuple[bytes, ...],
    loads: list[int],
    held: list[OrderedDict[bytes, None]],
    is_open: list[int],
    replica: int,
) -> None:
    """A choice keeps the bound, and is the best of those who keep it."""
    total = sum(loads[r] for r in is_open) + 1
    bound = max(options.load_slack, math.ceil(min(total, options.load_bound * total / len(is_open))))
    if options.policy == "round_robin":
        return
    assert loads[replica] + 1 <= bound
    if options.policy == "least_loaded":
        assert loads[replica] == min(loads[r] for r in is_open)
        return

    def found(r: int) -> int:
        return next((i for i, name in enumerate(names) if name not in held[r]), len(names))

    rivals = [(found(r), -loads[r]) for r in is_open if loads[r] + 1 <= bound]
    assert (found(replica), -loads[replica]) == max(rivals)


@settings(max_examples=200)
@given(OPTIONS, EVENTS)
def test_choices_are_allowed_the_best_and_repeatable(options: RouterOptions, events: list[tuple[str, int]]) -> None:
    assert play(options, events) == play(options, events)


def test_round_robin_takes_turns_and_passes_over_the_closed() -> None:
    router = Router(RouterOptions("round_robin"), [8] * 3)
    assert [router.choose() for _ in range(4)] == [0, 1, 2, 0]
    router.is_open[1] = False
    assert [router.choose() for _ in range(3)] == [2, 0, 2]


def test_who_holds_the_prompt_is_passed_over_at_its_bound() -> None:
    router = Router(RouterOptions(load_bound=1.5, load_slack=1), [8] * 2)
    prompt = PROMPTS[1]
    assert [router.choose(prompt) for _ in range(4)] == [0, 0, 0, 1]
    assert router.choose(prompt) == 1, "both hold it now: the less loaded one"
    assert router.choose(PROMPTS[3]) == 1


def test_equal_loads_and_nothing_held_are_taken_in_turn() -> None:
    router = Router(RouterOptions(), [8] * 4)
    order = []
    for _ in range(6):
        order.append(router.choose())
        router.finish(order[-1] or 0)
    assert order == [0, 1, 2, 3, 0, 1]


def test_what_is_evicted_or_forgotten_is_not_known_any_more() -> None:
    router = Router(RouterOptions(load_slack=9), [4, 4])
    assert router.choose(PROMPTS[1]) == 0
    assert router.choose(PROMPTS[4]) == 1
    router.forget(0)
    assert router.choose(PROMPTS[1]) == 0  # in turn, as nobody holds it
    assert router.choose((b"1", b"2", b"3", b"4")) == 1  # evicts "q" there
    router.finish(1)
    router.finish(1)
    assert router.choose(PROMPTS[4]) == 1
    assert router._held[1].keys() == {b"q", b"1", b"2", b"3"}, "the end of a prompt goes first"
