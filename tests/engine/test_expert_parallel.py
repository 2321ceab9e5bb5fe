"""Experts that are shared among ranks, each rank with whole ones: the answers of one process, and what a rank holds."""

from dataclasses import replace
from typing import Any

import pytest
from test_exactness import engine, requests, run

from quire import EngineArgs
from quire.engine.build import worker_config
from quire.errors import ConfigError, ModelLoadError
from quire.worker.worker import Worker

EP: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.nightly
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "gpt-oss"])
def test_exactness(model_options, family: str, quantization: str | None) -> None:
    one = engine(model_options(family), "bfloat16", quantization=quantization)
    todo = requests(one.config.model.vocab_size)[:12]
    expected = run(one, todo, 1)
    several = engine(model_options(family), "bfloat16", quantization=quantization, max_num_batched_tokens=64, **EP)
    assert run(several, todo, 12) == expected
    several.executor.stop()


def test_each_rank_holds_its_own_experts(model_options) -> None:
    config = worker_config(EngineArgs(**model_options("mixtral"), **EP).resolve())
    names: list[set[str]] = []
    for rank in range(2):
        worker = Worker(replace(config, rank=rank, load_format="none"))
        names.append({name for name in worker._model.checkpoint_shapes() if "layers.0" in name and "experts" in name})
    assert not names[0] & names[1]
    assert [len(each) for each in names] == [2 * 3, 3 * 3], "five experts, of three matrices each"


def test_a_model_without_experts_has_nothing_to_share() -> None:
    config = worker_config(EngineArgs("demo", **EP).resolve())
    with pytest.raises(ModelLoadError, match="'demo' has no experts to share: leave out enable_expert_parallel"):
        Worker(replace(config, load_format="none"))


def test_one_rank_has_nobody_to_share_with() -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel=True shares .* raise tensor_parallel_size"):
        EngineArgs("demo", enable_expert_parallel=True)
