"""Pinned prefixes beside requests: each that was taken can still end."""

import pytest

from quire.errors import InvalidRequestError
from quire.scheduler.beams import continuation_of

PROMPT = list(range(500, 512))


def test_pinned_blocks_survive_preemption_and_count_as_used(driver) -> None:
    d = driver(num_blocks=20, max_model_len=40)
    d.add("first", PROMPT, max_tokens=1)
    d.finish()
    d.scheduler.pin_prefix("p", PROMPT)
    assert d.scheduler.stats().kv_cache_usage_perc == pytest.approx(3 / 20)
    for name in "abcd":
        d.add(name, 12, max_tokens=20)
    while d.scheduler.has_unfinished():
        d.step()
    assert d.num_preemptions() > 0
    d.add("later", [*PROMPT, 1], max_tokens=1)
    (output,) = d.step()
    assert output.num_cached_tokens == 12
    assert d.scheduler.kv.reset_prefix_cache()
    assert d.num_free() == 20


def test_what_a_live_request_needs_is_not_pinned(driver) -> None:
    d = driver(num_blocks=20, max_model_len=40, make_continuation=continuation_of)
    d.add("first", PROMPT, max_tokens=1)
    d.finish()
    d.add("beams", 8, max_tokens=24, n=3, use_beam_search=True, temperature=0.0)
    d.schedule()
    with pytest.raises(InvalidRequestError, match="with this prefix pinned, the request can never fit"):
        d.scheduler.pin_prefix("p", PROMPT)
    assert d.kv.pins.listed() == []
    d.scheduler.abort("beams")
    d.scheduler.pin_prefix("p", PROMPT)
    with pytest.raises(InvalidRequestError, match="there are 17"):
        d.add("beams again", 8, max_tokens=24, n=3, use_beam_search=True, temperature=0.0)
