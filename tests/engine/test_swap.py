"""What goes to the host and comes back is the same to the last bit: tokens and logprobs don't tell that it was away."""

from typing import Any

import pytest
from test_exactness import FEW_BLOCKS, SOME_MODELS, drain, engine, facts, requests, run

from quire import LLM, SamplingParams
from quire.errors import ConfigError

FORKS = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=40, logprobs=2, ignore_eos=True)
SPACE = 0.01  # GiB


def check_swap(options: dict[str, Any], dtype: str, late: bool, caching: bool, num_tests: int) -> None:
    few = {"num_kv_blocks": FEW_BLOCKS[8], "block_size": 8, "max_model_len": 128, "enable_prefix_caching": caching}
    alone = engine(options, dtype, block_size=8, max_model_len=128)
    todo = [(prompt, params) for prompt, params in requests(alone.config.model.vocab_size)][:num_tests]
    expected = run(alone, todo, together=1)
    swapping = engine(options, dtype, late=late, swap_space=SPACE, **few)
    assert run(swapping, todo, together=7) == expected
    tiers = swapping.stats().tiers
    assert tiers is not None
    assert tiers.num_swaps_total > 0
    assert tiers.swapped_in_blocks_total > 0
    assert tiers.host_cache_usage_perc == 0, "what nobody waits for is kept"
    if caching:  # prompts that the device's few blocks have lost meanwhile
        before = tiers.host_hits_total
        assert run(swapping, todo, together=7) == expected
        after = swapping.stats().tiers
        assert after is not None
        assert after.host_hits_total > before


@pytest.mark.parametrize(("late", "caching"), [(False, True), (True, False)])
def test_swapping_changes_nothing(model_options, late: bool, caching: bool) -> None:
    check_swap(model_options("llama"), "bfloat16", late, caching, 12)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("model", SOME_MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("caching", [False, True])
def test_swapping_changes_nothing_matrix(model_options, model: str, dtype: str, caching: bool) -> None:
    check_swap(model_options(model), dtype, True, caching, 32)


@pytest.mark.parametrize("caching", [False, True])
def test_forks_that_share_blocks_come_back_right(model_options, caching: bool) -> None:
    found = []
    for changes in ({}, {"num_kv_blocks": 16, "swap_space": SPACE, "enable_prefix_caching": caching}):
        one = engine(model_options("gemma2"), "float32", block_size=8, max_model_len=128, **changes)
        for i in range(3):
            one.add_request(str(i), [7 + i, *range(20, 41)], FORKS)
        found.append(drain(one))
    assert found[0] == found[1]
    assert one.stats().tiers.num_swaps_total > 0
    assert one.stats().tiers.swapped_in_blocks_total > 0


def test_an_abort_gives_back_what_was_swapped(model_options) -> None:
    one = engine(model_options("llama"), "float32", block_size=8, max_model_len=128, num_kv_blocks=16, swap_space=SPACE)
    for i in range(6):
        one.add_request(str(i), [7 + i, *range(20, 41)], SamplingParams(max_tokens=60, ignore_eos=True))
    while not one.stats().tiers.host_cache_usage_perc:
        one.step()
    one.abort_request([str(i) for i in range(6)])
    one.step()
    assert one.stats().tiers.host_cache_usage_perc == 0
    one.check_integrity()


def test_swap_space_larger_than_memory_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="swap_space=1e.06 GiB is larger than the memory that is left"):
        LLM("demo", swap_space=1e6, show_progress=False)


def test_without_swap_space_there_is_no_second_memory(model_options) -> None:
    one = engine(model_options("llama"), "float32")
    assert one.stats().tiers is None
    one.add_request("0", [5, 6, 7], SamplingParams(max_tokens=3, logprobs=1))
    assert facts(one.step()[0])


def test_beams_that_were_swapped_find_the_same(model_options) -> None:
    found = []
    for changes in ({}, {"num_kv_blocks": 18, "swap_space": SPACE}):
        one = engine(model_options("llama"), "float32", block_size=8, max_model_len=128, **changes)
        for i in range(4):
            params = SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0, max_tokens=30, ignore_eos=True)
            one.add_request(str(i), [7 + i, *range(20, 41)], params)
        ended = {}
        while one.has_unfinished_requests():
            ended |= {each.request_id: each for each in one.step() if each.finished}
        one.check_integrity()
        found.append([[list(c.token_ids) for c in ended[str(i)].outputs] for i in range(4)])
    assert found[0] == found[1]
    assert one.stats().tiers.num_swaps_total > 0
