"""Pipelines of stages in processes: the answers of one process, whatever happens around them, and clear ends."""

import dataclasses
import os
import signal
import threading
import time
from typing import Any

import pytest
from test_exactness import VARIANTS, changes_of, engine, requests, run
from test_processes import generate_for_ever, nothing_left, workers

from quire import LLM, EngineArgs, SamplingParams
from quire.engine.build import worker_config
from quire.errors import ConfigError, EngineDeadError
from quire.executor import processes
from quire.layers.attention import SelfAttention
from quire.worker.worker import Worker

__all__ = ["nothing_left"]  # a fixture of all tests here
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2-moe", "gpt-oss", "gemma2", "gemma3", "opt", "gpt2"]
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
TREE = {"method": "medusa", "model": "demo-medusa", "speculative_token_tree": "[(0,), (1,)]"}
BOTH: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft model": {"method": "draft_model", "model": "demo-draft"},
    "medusa": {"method": "medusa", "model": "demo-medusa", "num_speculative_tokens": 2},
}


def answers(**options: Any) -> list[Any]:
    llm = LLM("demo", max_model_len=256, num_kv_blocks=512, show_progress=False, debug=True, **options)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, logprobs=2, n=1 + i % 2, ignore_eos=True)
        for i in range(4)
    ]
    params.append(SamplingParams(max_tokens=30, structured_outputs={"regex": "[a-z]{2,6}( [a-z]{2,6}){3,5}"}, seed=3))
    outputs = llm.generate(["Once upon a time", "The", "Once upon a time there", "A", "It"], params, use_tqdm=False)
    llm.llm_engine.shutdown()
    return [[(c.token_ids, c.logprobs) for c in output.outputs] for output in outputs]


@pytest.mark.slow
def test_two_stages_answer_as_one_process() -> None:
    assert answers(**PP2) == answers()


@pytest.mark.nightly
@pytest.mark.parametrize("drafts", DRAFTS)
def test_drafts(drafts: str) -> None:
    assert answers(speculative_config=DRAFTS[drafts], pp_partition="4,1", **PP2) == answers()


def test_windows_have_their_kv_group_beside_a_draft_model_without(model_options) -> None:
    """Of the draft model, which the last stage has, every stage counts the group."""
    drafts = {"method": "draft_model", "model": model_options("llama")["model"]}
    args = EngineArgs(**model_options("mistral"), max_model_len=128, speculative_config=drafts, **PP2)
    config = worker_config(args.resolve())
    for rank in range(2):
        worker = Worker(dataclasses.replace(config, rank=rank, load_format="none"))
        (attention,) = (module for module in worker._model.modules() if isinstance(module, SelfAttention))
        assert [group.window for group in worker._groups] == [None, 24]
        assert attention.spec.group == 1


def check_exactness(options: dict[str, Any], dtype: str, number: int, **changes: Any) -> None:
    variant = VARIANTS[number]._replace(late=False, tier="host" if VARIANTS[number].tier == "disk" else "none")
    weights = {name: changes[name] for name in ("quantization",) if name in changes}
    one = engine(options, dtype, **weights)
    todo = requests(one.config.model.vocab_size)
    expected = run(one, todo, 1)
    several = engine(options, dtype, **changes_of(variant, ""), **changes)
    assert run(several, todo, variant.together) == expected
    assert run(several, todo, variant.together) == expected, "found in the prefix cache"
    assert (several.stats().num_preemptions_total > 0) == variant.preempted
    several.executor.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "number", "changes"),
    [
        # Preemption to host memory, prefixes, forks, beams; then without host memory, and in small chunks.
        pytest.param("bfloat16", 9, PP2, marks=pytest.mark.nightly),
        pytest.param("bfloat16", 12, PP2 | {"quantization": "int8"}, marks=pytest.mark.nightly),
        ("bfloat16", 12, BOTH),
    ],
)
def test_exactness(model_options, dtype: str, number: int, changes: dict[str, Any]) -> None:
    check_exactness(model_options("demo"), dtype, number, **changes)


@pytest.mark.nightly
@pytest.mark.parametrize("changes", [PP2, BOTH], ids=["PP 2", "TP 2 x PP 2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(model_options, family: str, changes: dict[str, Any]) -> None:
    for quantization in (None, "int8"):
        check_exactness(model_options(family), "bfloat16", 9, quantization=quantization, **changes)


@pytest.mark.nightly
def test_prompts_overlap() -> None:
    """Chunks of one prompt are in several stages at once."""
    llm = LLM("demo", max_num_batched_tokens=32, num_kv_blocks=512, **PP2)
    executor, most = llm.llm_engine.executor, []
    submit, plans = executor.submit, llm.llm_engine.core._plans

    def counted(plan: Any) -> None:
        most.append(len(plans))
        submit(plan)

    executor.submit = counted  # pyright: ignore[reportAttributeAccessIssue]
    llm.generate([{"prompt_token_ids": list(range(5, 205))}], SamplingParams(max_tokens=2), use_tqdm=False)
    assert most[:6] == [1, 2, 2, 2, 2, 2]
    llm.llm_engine.shutdown()


@pytest.mark.nightly
def test_interrupts_lose_nothing() -> None:
    prompts, params = ["Once upon a time", "The", "It was"], SamplingParams(temperature=0, max_tokens=30, logprobs=1)
    one, llm = LLM("demo"), LLM("demo", debug=True, num_kv_blocks=512, **PP2)
    for i in range(3):
        threading.Timer(0.03 * (i + 1), os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            generate_for_ever(llm, prompts)
    found, expected = (each.generate(prompts, params, use_tqdm=False) for each in (llm, one))
    assert [o.outputs[0].logprobs for o in found] == [o.outputs[0].logprobs for o in expected]
    llm.llm_engine.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_stage_dies(stage: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SILENCE_SECONDS", 1.5)
    llm = LLM("demo", num_kv_blocks=512, **PP2)
    threading.Timer(0.3, os.kill, (workers(llm)[stage], number)).start()
    start, what = time.monotonic(), "SIGKILL" if number == signal.SIGKILL else "no sign of life"
    with pytest.raises(EngineDeadError, match=rf"rank {stage} of 2 .*{what}"):
        generate_for_ever(llm, ["The"] * 4)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 6}, "pipeline_parallel_size=6 exceeds the model's 5 layers; lower it"),
        ({"tensor_parallel_size": 64}, "tensor_parallel_size=64 exceeds the model's 4 heads; lower it"),
        ({"pipeline_parallel_size": 2, "pp_partition": "1,3"}, "pp_partition='1,3' must be 2 numbers .* sum to .* 5"),
        ({"pipeline_parallel_size": 2, "pp_partition": "5,0"}, "pp_partition='5,0' must be 2 numbers above 0"),
        ({"pipeline_parallel_size": 2, "pp_partition": "x"}, "pp_partition='x' must be 2 numbers"),
        ({"pp_partition": "2,3"}, "pp_partition='2,3' must be 1 numbers"),
        ({"pp_partition": "9" * 5000}, "pp_partition='9{79} must be 1 numbers"),
        (
            PP2 | {"speculative_config": {"method": "eagle", "model": "demo-eagle"}},
            "method='eagle' is refused with pipeline_parallel_size=2, as its head reads",
        ),
        (
            PP2 | {"speculative_config": TREE},
            "speculative_token_tree is refused with pipeline_parallel_size=2, as other stages would have to move",
        ),
        (
            PP2 | {"speculative_config": {"method": "medusa", "model": "demo-medusa", "acceptance": "typical"}},
            "acceptance='typical' is refused with pipeline_parallel_size=2, as other stages",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs("demo", **options).resolve()
