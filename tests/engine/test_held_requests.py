"""Requests that are held half done, whatever happens to the engine meanwhile, answer as if nothing had been."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loras import demo_adapters
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.lora.request import LoRARequest
from quire.outputs import RequestOutput
from quire.sampling_params import StructuredOutputsParams
from quire.utils.hub import resolve_model_path

DEMO = resolve_model_path("demo")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, ignore_eos=True)
DRAFT = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "debug": True, "block_size": 8}
# name -> prompt, parameters, which adapter
REQUESTS: dict[str, tuple[str, SamplingParams, int | None]] = {
    "greedy": ("Once upon a time there was a king", GREEDY, None),
    "drawn": ("The sea", SamplingParams(n=3, seed=5, max_tokens=20, logprobs=1, repetition_penalty=1.2), None),
    "beams": ("The old house", SamplingParams(use_beam_search=True, temperature=0.0, n=3, max_tokens=12), None),
    "prompt": ("It was a bright morning in spring", SamplingParams(seed=1, max_tokens=9, prompt_logprobs=2), None),
    "adapter": ("Once upon a time there was a king", GREEDY, 0),
    "its beams": ("The sea", SamplingParams(use_beam_search=True, temperature=0.0, n=2, max_tokens=16), 1),
    "its choice": (
        "The sea was",
        SamplingParams(seed=2, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="(calm|wild|blue){3}")),
        2,
    ),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """One more than the engine has places for."""
    return demo_adapters(tmp_path_factory.mktemp("adapters"), [4, 8, 3])


@pytest.fixture
def start() -> Iterator[Callable[..., LLM]]:
    running: list[LLM] = []

    def go(model: str = "demo", **options: Any) -> LLM:
        running.append(LLM(model, show_progress=False, **OPTIONS | options))
        return running[-1]

    yield go
    for llm in running:
        llm.llm_engine.shutdown()


def told(output: RequestOutput) -> tuple[Any, ...]:
    return output.prompt_logprobs, [(one.token_ids, one.logprobs, one.finish_reason) for one in output.outputs]


def run(llm: LLM, adapters: list[LoRARequest], between: Callable[[], None]) -> dict[str, Any]:
    """The answers to all, with something done between any two steps."""
    engine, found = llm.llm_engine, dict[str, Any]()
    for name, (prompt, params, own) in REQUESTS.items():
        engine.add_request(name, prompt, params, lora_request=None if own is None else adapters[own])
    for _ in range(10_000):
        found |= {output.request_id: told(output) for output in engine.step() if output.finished}
        if not engine.has_unfinished_requests():
            return found
        between()
    raise AssertionError(f"{engine.get_num_unfinished_requests()} requests never go on")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_blocks": 24, "swap_space": 0.01, "max_num_batched_tokens": 16},
        {"speculative_config": DRAFT},
        {"enable_prefix_caching": False, "max_num_seqs": 3},
    ],
    ids=["plain", "swap", "drafts", "few"],
)
def test_holding_changes_no_answer(
    start: Callable[..., LLM], adapters: list[LoRARequest], options: dict[str, Any]
) -> None:
    llm, rng, num_held = start(**options), random.Random(len(options)), 0
    core = llm.llm_engine.core

    def sleep() -> None:
        core.call("hold", False)
        assert core.call("sleep", rng.choice([1, 2]), True)
        assert not core.has_unfinished()
        core.call("wake_up", ["weights"])
        core.call("hold", True)
        core.call("wake_up")

    def forget() -> None:
        assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        llm.llm_engine.check_integrity()

    def perhaps_hold() -> None:
        nonlocal num_held
        if (drawn := rng.random()) < 0.8:
            return None if drawn < 0.7 else forget()
        num_held += 1
        core.call("hold", True)
        assert not core.has_unfinished()
        what: Callable[[], Any] = rng.choice(
            [
                lambda: None,
                lambda: core.call("reset_prefix_cache"),
                lambda: core.call("update_weights", str(DEMO)),
                sleep,
            ]
        )
        what()
        llm.llm_engine.check_integrity()
        core.call("hold", False)

    expected = run(llm, adapters, lambda: None)
    for _ in range(3):
        assert run(llm, adapters, perhaps_hold) == expected
    assert num_held > 5


@pytest.mark.slow
def test_other_weights_take_over_in_the_middle(start: Callable[..., LLM], tmp_path: Path) -> None:
    """What comes then is what they make of the tokens that are there, of which no key is the old weights'."""
    tensors = load_file(DEMO / "model.safetensors")
    save_file({n: t * 2.0 if "layers.2" in n else t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    llm = start(swap_space=0.01)
    engine, prompt, answers = llm.llm_engine, "Once upon a time there was a king", list[RequestOutput]()
    before = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    engine.add_request("held", prompt, GREEDY)
    while not answers or len(answers[-1].outputs[0].token_ids) < 10:
        answers += engine.step()
    engine.core.call("hold", True)
    assert engine.core.call("update_weights", str(tmp_path))
    engine.core.call("hold", False)
    while engine.has_unfinished_requests():
        answers += engine.step()
    found = answers[-1].outputs[0].token_ids
    kept = before.outputs[0].token_ids[:10]
    assert found[:10] == kept
    assert found != before.outputs[0].token_ids
    rest = {"prompt_token_ids": [*(before.prompt_token_ids or []), *kept]}
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    assert llm.generate(rest, params, use_tqdm=False)[0].outputs[0].token_ids == found[10:]
