"""Every way of drafting, under everything: tokens and logprobs are those of plain decoding, to the last bit.

The requests of the exactness matrix on text that repeats itself, so that there is something to draft: greedy, seeded
with penalties, forked, searched by beams. A new method is a line of `METHODS`.
"""

from pathlib import Path
from typing import Any

import pytest
from test_exactness import engine, requests, run

import quire
from quire.text.tokenizer import load_tokenizer

TEXT = "The captain said that the ship would sail at dawn. The mate said that the ship would not sail at dawn. " * 3
WIDE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]"
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "suffix": {"suffix_decoding_max_cached_requests": 50},
    "draft_model": {"model": "demo-draft"},
    "medusa": {"model": "demo-medusa"},
    "eagle": {"model": "demo-eagle"},
    "eagle3": {"model": "demo-eagle3"},
    "eagle tree": {"method": "eagle", "model": "demo-eagle", "speculative_token_tree": WIDE},
    "eagle3 tree": {"method": "eagle3", "model": "demo-eagle3", "speculative_token_tree": WIDE},
}
FORMATS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
]
WAYS: dict[str, dict[str, Any]] = {
    "prefixes": {"enable_prefix_caching": True, "max_num_batched_tokens": 48, "block_size": 16},
    "preempted": {"num_kv_blocks": 20, "block_size": 16, "max_model_len": 128, "max_num_batched_tokens": 96},
    "late": {"late": True, "block_size": 8},
    "swapped": {"num_kv_blocks": 20, "block_size": 16, "max_model_len": 128, "swap_space": 0.01, "late": True},
    "adaptive": {"adaptive": True},
}


@pytest.fixture(scope="module")
def todo() -> list[Any]:
    """Prompts and parameters."""
    ids = load_tokenizer(str(Path(quire.__file__).parent / "demo")).encode(TEXT)
    lengths = [9, 17, 32, 50, 64]
    return [(ids[i % 7 : i % 7 + lengths[i % 5]], params) for i, (_, params) in enumerate(requests(4096, 32))]


@pytest.fixture(scope="module")
def alone(model_options, todo):
    """The answers without drafts, one after another; computed once a format."""
    known: dict[str, list[Any]] = {}

    def answers(options: dict[str, Any]) -> list[Any]:
        if str(options) not in known:
            known[str(options)] = run(engine(model_options("demo"), **options), todo, together=1)
        return known[str(options)]

    return answers


def check(model_options, alone, todo, method: str, k: int, options: dict[str, Any], way: str) -> None:
    changes = {name: value for name, value in WAYS[way].items() if name != "adaptive"}
    config = {"method": method, "num_speculative_tokens": k, "adaptive": way == "adaptive"} | METHODS[method]
    if method == "medusa" and k > 4:
        config["speculative_token_tree"] = WIDE  # the demo has four heads
    if "speculative_token_tree" in config:
        del config["num_speculative_tokens"]
    one = engine(model_options("demo"), **options, **changes, speculative_config=config)
    expected = alone(options)
    assert run(one, todo, together=7) == expected
    stats = one.stats()
    assert stats.speculation is not None
    if way != "adaptive":
        assert stats.speculation.num_accepted_tokens > 5, "hardly any draft was accepted, so hardly anything was tested"
        assert stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens
    if "num_kv_blocks" in changes:
        assert stats.num_preemptions_total > 0, "nothing was preempted, so nothing was tested"
    if way == "prefixes":
        assert run(one, todo, together=32) == expected
    one.executor.stop()


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("options", FORMATS, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("method", METHODS)
def test_drafting_matrix(model_options, alone, todo, method: str, k: int, options: dict[str, Any], way: str) -> None:
    check(model_options, alone, todo, method, k, options, way)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("options", FORMATS, ids=lambda o: "-".join(o.values()))
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("method", METHODS)
def test_drafting_on_two_threads(
    model_options, alone, todo, method: str, k: int, options: dict[str, Any], two_threads
) -> None:
    with two_threads(used=False):
        alone(options)
    with two_threads(used=True):
        check(model_options, alone, todo, method, k, options, "prefixes")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_drafting_on_plain_torch(model_options, alone, todo, method: str) -> None:
    check(model_options, alone, todo, method, 3, {"dtype": "float32", "kernels": "torch"}, "prefixes")
