"""Which tokens a step computes: budget, chunks, order, admission, and why others wait."""

import pytest

from quire.config.scheduler import SchedulerConfig
from quire.errors import ConfigError, InvalidRequestError
from quire.protocol.step import Sampling


def test_a_prompt_is_computed_then_a_token_a_step(driver) -> None:
    d = driver()
    d.add("a", 6, max_tokens=3)
    assert d.schedule() == {"a": 6}
    (new,) = d.plan.new_sequences
    assert (new.num_computed_tokens, len(new.block_ids[0]), new.output_token_ids) == (0, 2, [])
    assert d.plan.scheduled[0].num_samples == 1
    (output,) = d.update()
    assert (output.new_token_ids, output.finish_reason) == ([7], None)
    assert d.schedule() == {"a": 1}
    assert d.plan.new_sequences == []
    d.update()
    d.schedule()
    (output,) = d.update()
    assert output.finish_reason == "length"
    assert not d.scheduler.has_unfinished()
    assert d.schedule() == {}
    assert d.removed() == ["a"]


def test_blocks_come_when_they_are_needed(driver) -> None:
    d = driver()
    d.add("a", 4, max_tokens=6)
    d.step()
    d.schedule()
    assert [len(ids) for ids in d.plan.scheduled[0].new_block_ids] == [1]
    d.update()
    for _ in range(3):
        d.schedule()
        assert d.plan.scheduled[0].new_block_ids == []
        d.update()
    d.schedule()
    assert [len(ids) for ids in d.plan.scheduled[0].new_block_ids] == [1]


def test_long_prompts_are_cut_and_decoding_goes_first(driver) -> None:
    d = driver(max_num_batched_tokens=10)
    d.add("a", 4)
    d.add("b", 20)
    assert d.schedule() == {"a": 4, "b": 6}
    assert [s.sampling for s in d.plan.scheduled] == [Sampling.DRAW, Sampling.NONE]
    assert [output.request_id for output in d.update()] == ["a"]
    d.add("c", 3)
    assert d.schedule() == {"a": 1, "b": 9}
    d.update()
    assert d.schedule() == {"a": 1, "b": 5, "c": 3}
    assert len(d.update()) == 3


def test_prompts_share_a_step_under_a_threshold(driver) -> None:
    d = driver(max_num_batched_tokens=10, long_prefill_token_threshold=4)
    d.add("a", 9)
    d.add("b", 9)
    d.add("c", 9)
    assert d.schedule() == {"a": 4, "b": 4, "c": 2}


def test_whole_prompts_first_without_chunked_prefill(driver) -> None:
    d = driver(enable_chunked_prefill=False, max_model_len=20, max_num_batched_tokens=20)
    d.add("a", 12)
    d.add("b", 9)
    assert d.schedule() == {"a": 12}
    assert d.waiting_reasons() == {"budget": 1}
    d.update()
    assert d.schedule() == {"b": 9}
    d.update()
    assert d.schedule() == {"a": 1, "b": 1}
    d.update()
    d.add("c", 3)
    assert d.schedule() == {"c": 3}
    d.update()
    assert d.schedule() == {"a": 1, "b": 1, "c": 1}


def test_first_come_first_served_by_order_of_add(driver) -> None:
    d = driver(max_num_seqs=1)
    d.add("a", max_tokens=1, arrival_time=5.0, priority=9)
    d.add("b", max_tokens=1, arrival_time=1.0, priority=0)
    assert [list(d.schedule()), d.update() and list(d.schedule())] == [["a"], ["b"]]


def test_priority_order(driver) -> None:
    d = driver(max_num_seqs=1, policy="priority")
    d.add("a", max_tokens=1, priority=1, arrival_time=3.0)
    d.add("b", max_tokens=1, priority=1, arrival_time=2.0)
    d.add("c", max_tokens=1, priority=0, arrival_time=4.0)
    d.add("d", max_tokens=1, priority=1, arrival_time=2.0)
    order = []
    while d.scheduler.has_unfinished():
        order += d.schedule()
        d.update()
    assert order == ["c", "b", "d", "a"]


def test_a_big_request_at_the_front_is_not_overtaken(driver) -> None:
    d = driver(num_blocks=10)
    d.add("a", 16)
    d.add("big", 28, max_tokens=2)
    d.add("small", 4)
    assert d.schedule() == {"a": 16}
    assert d.waiting_reasons() == {"blocks": 1, "order": 1}
    assert d.why("big") == "blocks: it needs up to 7 KV blocks; free: 6"
    assert d.why("small").startswith("order: ")
    assert d.why("a") is None
    assert d.why("nobody") is None


def test_each_group_of_blocks_has_its_own_share_to_spare(driver) -> None:
    """A window's group is small beside that of full attention: a share of the larger may be all that it has."""
    d = driver(num_blocks=10_000, windows={8: 60})
    for name in "abcd":
        d.add(name, 3)
    assert d.schedule() == {"a": 3, "b": 3, "c": 3, "d": 3}
    for num_tokens in (197 * 4, 197 * 4 + 1):
        d = driver(num_blocks=200, max_model_len=1000, max_num_batched_tokens=1000)
        d.add("a", 4)
        d.add("b", num_tokens, max_tokens=2)
        assert ("b" in d.schedule()) == (num_tokens == 197 * 4), "two of 200 blocks are left free"


def test_reasons_to_wait(driver) -> None:
    d = driver(max_num_seqs=1, max_num_batched_tokens=8)
    d.add("a", 20)
    assert d.waiting_reasons() == {"next_step": 1}
    assert d.why("a").startswith("next_step: ")
    d.add("b")
    d.add("c")
    d.step()
    assert d.waiting_reasons() == {"budget": 2}
    assert d.why("c").startswith("budget: the step's 8 tokens")
    d.step()
    d.step()
    assert d.waiting_reasons() == {"capacity": 2}
    assert d.why("b") == "capacity: 1 of at most 1 sequences run"
    stats = d.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 2)


def test_no_more_sequences_than_tokens_in_a_step(driver) -> None:
    d = driver(max_num_seqs=8, max_num_batched_tokens=3)
    d.add("a", 1, n=5)
    d.step()
    assert d.scheduler.stats().num_requests_running == 3
    assert d.schedule() == {"a": 1, "a/1": 1, "a/2": 1}


def test_prefix_hits_are_counted_once_and_reported(driver) -> None:
    d = driver()
    d.add("a", [1] * 9, max_tokens=1)
    d.step()
    d.add("b", [1] * 9, max_tokens=2)
    assert d.schedule() == {"b": 1}
    assert d.plan.new_sequences[0].num_computed_tokens == 8
    (output,) = d.update()
    assert output.num_cached_tokens == 8
    assert d.prefix_cache() == (18, 8)


def test_a_prefix_that_is_being_computed_is_waited_for(driver) -> None:
    d = driver(max_num_batched_tokens=10)
    shared = list(range(12))
    d.add("a", [*shared, 50])
    d.add("b", [*shared, 60])
    d.add("c", 2)
    assert d.schedule() == {"a": 10}
    d.update()
    assert d.schedule() == {"a": 3, "c": 2}, "who is not ready holds nobody up"
    assert d.waiting_reasons() == {"prefix": 1}
    assert d.why("b") == "prefix: its beginning is being computed for another request"
    d.update()
    assert d.schedule() == {"a": 1, "b": 1, "c": 1}


def test_prompt_logprobs_want_the_prompt_computed(driver) -> None:
    d = driver()
    d.add("a", [1] * 9, max_tokens=1)
    d.step()
    d.add("b", [1] * 9, max_tokens=1, prompt_logprobs=0)
    assert d.schedule() == {"b": 9}


def test_reset_prefix_cache(driver) -> None:
    d = driver()
    d.add("a", [1] * 9, max_tokens=2)
    d.step()
    assert not d.scheduler.kv.reset_prefix_cache()
    d.step()
    assert d.scheduler.kv.reset_prefix_cache()
    d.add("b", [1] * 9)
    assert d.schedule() == {"b": 9}


def test_requests_may_come_during_a_step(driver) -> None:
    d = driver()
    d.add("a")
    d.schedule()
    d.add("b")
    assert len(d.update()) == 1
    assert d.schedule() == {"a": 1, "b": 5}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 5, "prompt is empty"),
        (50, 5, "maximum context length is 50 tokens.* the prompt has 50"),
        (25, 25, r"25 prompt tokens and max_tokens=25 need 13 KV blocks of 4 tokens, and there are 12"),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(driver, prompt, max_tokens: int, message: str) -> None:
    d = driver(num_blocks=12, max_model_len=50)
    with pytest.raises(InvalidRequestError, match=message):
        d.add("a", prompt, max_tokens)
    assert not d.scheduler.has_unfinished()


def test_what_just_fits_runs(driver) -> None:
    d = driver(num_blocks=12, max_model_len=50)
    d.add("a", 24, max_tokens=25)  # 48 tokens are computed
    assert d.finish() == {"a/0": "length"}


def test_a_request_id_is_refused_while_it_is_in_use(driver) -> None:
    d = driver()
    d.add("a", max_tokens=1)
    with pytest.raises(InvalidRequestError, match="'a' is in use") as error:
        d.add("a")
    assert error.value.param == "request_id"
    d.finish()
    d.add("a", max_tokens=1)
    assert d.finish() == {"a/0": "length"}


def test_config_is_checked(driver) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be an integer, at least 1, got 0"):
        SchedulerConfig(max_model_len=8, max_num_seqs=0)
    with pytest.raises(ConfigError, match="long_prefill_token_threshold must be an integer, at least 0, got True"):
        SchedulerConfig(max_model_len=8, long_prefill_token_threshold=True)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=7 is below max_model_len=8"):
        SchedulerConfig(max_model_len=8, max_num_batched_tokens=7, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="long_prefill_token_threshold=3 cuts prompts"):
        SchedulerConfig(max_model_len=8, long_prefill_token_threshold=3, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="must be one of 'fcfs', 'priority', .*, got 'random'"):
        driver(policy="random")
