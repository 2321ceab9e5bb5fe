"""Limits and policies that change while requests run: at the next step, without ending anybody, or refused by name."""

from typing import Any

import pytest

from quire.config.scheduler import OPTIONS_OF, PolicyOptions
from quire.errors import ConfigError, InvalidRequestError
from quire.scheduler.policies.registry import POLICIES


def test_every_policy_has_an_entry_in_the_configuration() -> None:
    assert list(OPTIONS_OF) == list(POLICIES)


def test_lower_limits_hold_as_sequences_end(driver) -> None:
    d = driver(max_num_seqs=4, max_num_batched_tokens=40)
    for name in "abcdef":
        d.add(name, 4, max_tokens=3 if name in "ab" else 6)
    d.step()
    d.scheduler.set_limits({"max_num_seqs": 2, "max_num_batched_tokens": 3})
    assert d.schedule() == dict.fromkeys("abcd", 1), "who runs goes on, beyond both limits"
    d.update()
    d.step()
    assert d.schedule() == {"c": 1, "d": 1}, "a and b have ended, and nobody takes their places"
    assert d.why("e") == "capacity: 2 of at most 2 sequences run"
    d.update()
    limits = d.scheduler.set_limits({"max_num_seqs": 4, "max_num_batched_tokens": 40})
    assert (limits.max_num_seqs, limits.most_num_seqs, limits.most_num_batched_tokens) == (4, 4, 40)
    assert d.schedule() == {"c": 1, "d": 1, "e": 4, "f": 4}
    d.update()
    assert set(d.finish()) == {f"{name}/0" for name in "cdef"}


def test_nobody_is_pushed_out_for_one_that_a_lower_limit_keeps_out(driver) -> None:
    d = driver(policy="priority", max_num_seqs=3)
    for name, priority in (("a", 0), ("b", 0), ("late", 1)):
        d.add(name, 4, priority=priority)
    d.step()
    d.scheduler.set_limits({"max_num_seqs": 2})
    d.add("c", 4, priority=0)
    assert d.schedule() == {"a": 1, "b": 1, "late": 1}, "with its place there would be none for c"
    assert d.num_preemptions() == 0
    d.update()
    d.finish()


def test_another_policy_orders_those_that_wait_anew(driver) -> None:
    d = driver(max_num_seqs=1)
    d.add("running", 4, max_tokens=2)
    d.step()
    d.add("long", 30, max_tokens=2)
    d.add("short", 3, max_tokens=2)
    d.add("urgent", 4, max_tokens=2, priority=-1)
    d.scheduler.set_limits({"policy": "shortest", "ageing_rate": 5})
    d.scheduler.check_integrity()
    d.step()
    assert d.schedule() == {"short": 3}
    d.update()
    d.scheduler.set_limits({"policy": "priority"})
    assert d.schedule() == {"urgent": 4}, "it comes first, and may push out what runs"
    d.update()
    assert d.scheduler.limits.policy_options == {}
    d.finish()


def test_other_options_of_a_policy_keep_what_it_knows(driver) -> None:
    d = driver(max_num_seqs=1, policy="fair")
    for i in range(4):
        d.add(str(i), 8, max_tokens=2, client=f"c{i % 2}")
    d.step()
    rank = d.scheduler._planner.policy.rank
    before = [rank("c0"), rank("c1")]
    limits = d.scheduler.set_limits({"fair_output_weight": 5.0})
    assert limits.policy_options == {"fair_input_weight": 1.0, "fair_output_weight": 5.0}
    rank = d.scheduler._planner.policy.rank
    assert [rank("c0"), rank("c1")] == before == [10.0, 0.0]
    d.scheduler.check_integrity()
    d.finish()


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"max_num_seq": 3}, "max_num_seq", "unknown limit 'max_num_seq'. Did you mean 'max_num_seqs'?"),
    ({"zzz": 3}, "zzz", "unknown limit 'zzz'. There are max_num_seqs, "),
    ({"max_num_seqs": "3"}, "max_num_seqs", "max_num_seqs must be an integer, at least 1, got '3'"),
    ({"max_num_seqs": True}, "max_num_seqs", "must be an integer"),
    ({"max_num_seqs": None}, "max_num_seqs", "must be an integer"),
    ({"max_num_seqs": 0}, "max_num_seqs", "at least 1, got 0"),
    ({"max_num_seqs": 9}, "max_num_seqs", "max_num_seqs=9 is above 8, for which memory was reserved at the start"),
    ({"max_num_batched_tokens": 101}, "max_num_batched_tokens", "is above 100"),
    ({"policy": "lifo"}, "policy", "policy must be one of 'fcfs', 'priority', 'fair', 'shortest', 'deadline', got"),
    ({"policy": ["fcfs"]}, "policy", "policy must be one of"),
    ({"ttft_target": 1.0}, "ttft_target", "ttft_target is of no use to the policy 'fcfs'"),
    ({"policy": "deadline", "ttft_target": -1.0}, "ttft_target", "ttft_target must be a number, over 0, got -1.0"),
    ({"policy": "shortest", "ageing_rate": "9"}, "ageing_rate", "ageing_rate must be a number"),
]


@pytest.mark.parametrize(("changes", "param", "message"), BAD, ids=str)
def test_bad_limits_are_refused_by_name(driver, changes: dict[str, Any], param: str, message: str) -> None:
    d = driver()
    before = d.scheduler.limits
    with pytest.raises(InvalidRequestError) as found:
        d.scheduler.set_limits({"max_num_seqs": 3} | changes)
    assert found.value.param == param
    assert message in str(found.value)
    assert d.scheduler.limits == before, "all or nothing"


def test_without_chunked_prefill_a_step_must_hold_a_prompt(driver) -> None:
    d = driver(max_model_len=50, enable_chunked_prefill=False)
    with pytest.raises(InvalidRequestError, match="max_num_batched_tokens=49 is below max_model_len=50"):
        d.scheduler.set_limits({"max_num_batched_tokens": 49})


def test_an_option_of_another_policy_is_refused_at_the_start(driver) -> None:
    with pytest.raises(ConfigError, match="ageing_rate=9.0 is for the policy 'shortest', and the policy is 'fair'"):
        driver(policy="fair", policy_options=PolicyOptions(ageing_rate=9.0))
    with pytest.raises(ConfigError, match="tpot_target must be a number, over 0, got -1"):
        PolicyOptions(tpot_target=-1)


def test_why_tells_the_place_and_the_policys_reason(driver) -> None:
    d = driver(max_num_seqs=1, policy="fair")
    d.add("a", 8, max_tokens=9, client="x")
    d.step()
    for i in range(3):
        d.add(f"x{i}", 4, client="x")
    d.add("y", 4, client="y")
    d.step()
    capacity = "capacity: 1 of at most 1 sequences run"
    assert d.why("y") == capacity
    assert d.why("x2") == (
        f"{capacity}; 2 requests come first and 1 other client is next in turn "
        "(its client's counter stands at 12, that of the next in turn at 10)"
    )
    wanted = {
        "fcfs": "2 requests come first (those came earlier)",
        "priority": "2 requests come first (those came earlier, or have a lower number than its priority 0)",
        "shortest": "2 requests come first (it may take 24 tokens, the first 24, and a second of waiting ",
        "deadline": "2 requests come first (it has no ttft_target, and is due 60 s after its arrival, and 0 s",
    }
    for policy, text in wanted.items():
        d.scheduler.set_limits({"policy": policy})
        d.step()
        assert text in str(d.why("x2")), policy
