"""`quire plan`: its figures are those of a start, and it loads nothing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs

from quire.config.engine_args import EngineArgs
from quire.engine.build import cache_request, worker_config
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.plan import make_plan
from quire.executor.inprocess import InProcessExecutor
from quire.executor.remote import RemoteExecutor
from quire.executor.select import select_executor
from quire.kvcache.capacity import num_bytes, plan_cache
from quire.utils.hub import resolve_model_path

DEMO = resolve_model_path("demo")
DRAFT = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}
EAGLE = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3}


@pytest.mark.parametrize("speculative", [None, DRAFT, EAGLE], ids=["plain", "draft", "eagle3"])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_it_says_what_a_start_then_measures(
    quantization: Literal["int4"] | None, speculative: dict[str, object] | None
) -> None:
    args = EngineArgs(model="demo", quantization=quantization, speculative_config=speculative)
    plan = make_plan(args)
    config = args.resolve()
    worker = InProcessExecutor(replace(worker_config(config), weight_cache=False))
    loaded, report = worker.start(False), worker.cache_report()
    layout = plan_cache(cache_request(config, 1), structs.replace(report, available_bytes=plan.free))
    worker.stop()
    (share,) = plan.shares
    assert share.weights == loaded.weight_bytes
    assert share.activations == pytest.approx(report.activation_bytes, rel=0.05)
    assert share.kv_cache == pytest.approx(num_bytes(layout.num_blocks, report), rel=0.05)
    assert plan.max_model_len == layout.max_model_len
    assert plan.worker.num_parameters == loaded.num_parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.nightly)], ids=["TP", "PP", "both"]
)
def test_it_says_what_each_rank_then_holds(tensor: int, pipeline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model="demo", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    plan = make_plan(args)
    config, told = args.resolve(), dict[str, list[Any]]()
    ask = RemoteExecutor._ask

    def noted(executor: RemoteExecutor, name: str, *argument: object) -> list[Any]:
        told[name] = ask(executor, name, *argument)
        return told[name]

    monkeypatch.setattr(RemoteExecutor, "_ask", noted)
    executor = select_executor(worker_config(config), args)
    try:
        executor.start(False)
        report = executor.cache_report()
    finally:
        executor.stop()
    num_blocks = plan_cache(cache_request(config, pipeline), report).num_blocks
    assert plan.num_blocks == max(num_blocks)
    assert len(plan.shares) == tensor * pipeline
    for share, loaded, found in zip(plan.shares, told["load"], told["cache_report"], strict=True):
        assert share.weights == loaded.weight_bytes
        assert share.activations == pytest.approx(found.activation_bytes, rel=0.05)
        assert share.kv_cache == pytest.approx(num_bytes(num_blocks, found), rel=0.05)
    assert plan.shares[:1] * tensor == plan.shares[:tensor], "the demo divides by two"
    assert plan.shares[0] != plan.shares[-1] or pipeline == 1, "stages have different layers"


def test_engines_share_the_machine() -> None:
    limits: dict[str, Any] = {"max_num_seqs": 4096, "gpu_memory_utilization": 0.01}
    one, two = (make_plan(EngineArgs(model="demo", data_parallel_size=size, **limits)) for size in (1, 2))
    assert two.shares[0].weights == one.shares[0].weights
    taken = [plan.shares[0].kv_cache + plan.shares[0].activations for plan in (one, two)]
    assert taken[1] == pytest.approx(taken[0] / 2, rel=0.1)


def without_weights(folder: Path, **changes: object) -> str:
    """A copy of the demo that has nothing but its configuration, so changed."""
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return str(folder)


def test_a_configuration_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", without_weights(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "4,737,792 parameters" in printed
    assert "It fits" in printed


def test_a_model_larger_than_memory_takes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some 200 GB in bfloat16: int8 does not fit either, and no page of it is touched."""
    model = without_weights(tmp_path, hidden_size=16384, intermediate_size=53248, num_hidden_layers=30)
    with pytest.raises(SystemExit, match="1"):
        main(["plan", model, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert found["ranks"][0]["weights"] > 1.5e11
    assert "of memory are free" in found["refusal"]


def test_it_says_with_which_context_it_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["plan", "demo", "--max-model-len", "512", "--kv-cache-memory", "1000000"])
    printed = capsys.readouterr().out
    assert "It does not fit: max_model_len=512 needs" in printed
    assert "It fits with --max-model-len 384" in printed


def test_what_no_start_takes_is_refused_as_a_start_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--max-num-seqs", "0"]) == 2
    assert "max_num_seqs" in capsys.readouterr().err
