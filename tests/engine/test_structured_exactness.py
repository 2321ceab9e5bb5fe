"""Requests with grammars in the exactness matrix: tokens and logprobs of each alone, whatever runs beside it.

Every structure, drawn in every way, with stop strings, logits processors and what else bends or ends an output, among
requests that are free: in each variant of `test_exactness`, on two threads, and under every method of drafting. Few of
them in few ways without QUIRE_NIGHTLY=1, as test_structured.py has further ones.
"""

import os
import tempfile
from typing import Any

import msgspec
import pytest
from test_drafting_exactness import METHODS
from test_exactness import SOME_VARIANTS, VARIANTS, Variant, changes_of, run
from test_structured import PROMPTS, STRUCTURES, engine, mixed

from quire import SamplingParams

NIGHTLY = os.environ.get("QUIRE_NIGHTLY") == "1"


def sparse(output_ids: list[int], logits: Any) -> Any:
    """Looks back: it would see a wrong draft."""
    if output_ids and output_ids[-1] % 3 == 0:
        logits[output_ids[-1]] -= 2.0
    return logits


BENT: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 7, "logits_processors": [sparse], "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 8, "stop": ["1", "o", '",'], "min_tokens": 3, "bad_words": ["a", "dog"]},
    {"temperature": 0.7, "seed": 9, "stop_token_ids": [40, 77, 90], "top_k": 30, "min_p": 0.01, "n": 2},
]


@pytest.fixture(scope="module")
def todo() -> list[Any]:
    """Prompts and parameters."""
    params = mixed()
    params += [
        SamplingParams(max_tokens=40, structured_outputs=structure, **kind)
        for place, structure in enumerate(STRUCTURES)
        for kind in (BENT[place % 3], BENT[(place + 1) % 3])
    ]
    found = [(PROMPTS[i % len(PROMPTS)], msgspec.structs.replace(one, logprobs=1)) for i, one in enumerate(params)]
    # However fast grammars are compiled, this one alone has no room where there are few blocks.
    wide: dict[str, Any] = {"n": 4, "max_tokens": 50, "temperature": 1.0, "seed": 1, "ignore_eos": True, "logprobs": 1}
    wide |= {"structured_outputs": {"regex": "[a-z ]*"}}
    return [*found[:: 2 if NIGHTLY else 5], (PROMPTS[0], SamplingParams(**wide))]


@pytest.fixture(scope="module")
def alone(todo: list[Any]) -> list[Any]:
    """The answers of one after another."""
    return run(engine(enable_prefix_caching=False), todo, together=1)


def check_variant(alone: list[Any], todo: list[Any], variant: Variant) -> None:
    with tempfile.TemporaryDirectory() as folder:
        changes = changes_of(variant, folder)
        one = engine(variant.late, **changes)
        assert run(one, todo, variant.together) == alone
        assert (one.stats().num_preemptions_total > 0) or not variant.preempted
        if variant.prefix:
            assert run(one, todo, variant.together) == alone
        one.executor.stop()
        if variant.tier == "disk":
            restarted = engine(variant.late, **changes)
            assert run(restarted, todo, variant.together) == alone
            restarted.executor.stop()


@pytest.mark.slow
@pytest.mark.parametrize("variant", SOME_VARIANTS[2:])
def test_exactness(alone: list[Any], todo: list[Any], variant: Variant) -> None:
    check_variant(alone, todo, variant)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v)))
def test_exactness_matrix(alone: list[Any], todo: list[Any], variant: Variant) -> None:
    check_variant(alone, todo, variant)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("variant", SOME_VARIANTS)
def test_exactness_on_two_threads(todo: list[Any], variant: Variant, two_threads: Any) -> None:
    with two_threads(used=False):
        expected = run(engine(enable_prefix_caching=False), todo, together=1)
    with two_threads(used=True):
        check_variant(expected, todo, variant)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS if NIGHTLY else ["suffix", "eagle3", "eagle tree"])
def test_drafts_of_every_method_change_nothing(alone: list[Any], todo: list[Any], method: str) -> None:
    check_drafts(alone, todo, method, False, {})


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_drafts_under_preemption(alone: list[Any], todo: list[Any], method: str, adaptive: bool) -> None:
    blocks = {"num_kv_blocks": 12, "block_size": 8, "max_model_len": 90, "swap_space": 0.01 if adaptive else 0.0}
    check_drafts(alone, todo, method, adaptive, blocks)


def check_drafts(alone: list[Any], todo: list[Any], method: str, adaptive: bool, options: dict[str, Any]) -> None:
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": adaptive} | METHODS[method]
    if "speculative_token_tree" in config:
        del config["num_speculative_tokens"]
    one = engine(speculative_config=config, **options)
    assert run(one, todo, together=16) == alone
    stats = one.stats()
    assert stats.speculation is not None
    assert adaptive or stats.speculation.num_accepted_tokens > 5
    assert (stats.num_preemptions_total > 0) == ("num_kv_blocks" in options)
    one.executor.stop()
