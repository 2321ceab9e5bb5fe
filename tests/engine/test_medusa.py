"""Medusa heads from the outside: the demo's draft well and change nothing, and others are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_speculation import check, method_of

from quire import LLM, SamplingParams
from quire.errors import ModelLoadError
from quire.utils.hub import resolve_model_path

STORIES = ["Once upon a time", "The captain", "In the morning", "He said that", "The old woman", "A great ship"]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Any]]:
    return {}


def heads(folder: Path, change: dict[str, torch.Tensor | None], **config: Any) -> dict[str, Any]:
    """The demo's, with other tensors or another config.json."""
    source = resolve_model_path("demo-medusa")
    tensors = {**load_file(source / "model.safetensors"), **change}
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")
    stated = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(stated))
    return {"method": "medusa", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}


def test_heads_change_no_answer(plain: dict[str, list[Any]]) -> None:
    check(plain, method_of("medusa", 3))


def test_trees_of_heads_change_no_answer_and_have_more_accepted(plain: dict[str, list[Any]]) -> None:
    tree = {"speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]"}
    llm = check(plain, {"method": "medusa", "model": "demo-medusa"} | tree)
    stats = llm.get_metrics().speculation
    assert stats is not None
    assert len(stats.num_accepted_tokens_per_pos) == 4
    num_steps, num_accepted = stats.num_drafts, stats.num_accepted_tokens
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    llm.generate(STORIES, params, use_tqdm=False)
    stats = llm.get_metrics().speculation
    assert stats is not None
    assert stats.num_accepted_tokens - num_accepted > 1.4 * (stats.num_drafts - num_steps)  # 1.9 where it was measured


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_heads_may_be_quantized(plain: dict[str, list[Any]], quantization: str) -> None:
    check(plain, method_of("medusa", 4) | {"quantization": quantization})


def test_the_demos_heads_draft_well() -> None:
    llm = LLM("demo", speculative_config={"method": "medusa", "model": "demo-medusa", "adaptive": False})
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    llm.generate(STORIES, params, use_tqdm=False)
    stats = llm.get_metrics().speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 1.0 * stats.num_drafts  # 1.5 where it was measured
    first, *_, last = stats.num_accepted_tokens_per_pos
    assert first > 0.5 * stats.num_drafts
    assert 0 < last < first


def test_heads_of_vllms_form_with_their_own_outputs(tmp_path: Path) -> None:
    """With an output head each, one of them over part of the vocabulary: a head that drafts likewise."""
    embedding = load_file(resolve_model_path("demo") / "model.safetensors")["model.embed_tokens.weight"]
    source = load_file(resolve_model_path("demo-medusa") / "model.safetensors")
    kept = torch.arange(0, 4096, 2)
    found: list[int] = []
    for truncated in (False, True):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in source.items():
            head, layer, _, kind = name.split(".")
            tensors[f"blocks.{head}.layers.{layer}.{kind}"] = tensor
            tensors[f"lm_heads.{head}.weight"] = embedding[kept].clone() if truncated else embedding.clone()
        if truncated:
            tensors["token_map"] = kept
        save_file(tensors, tmp_path / "model.safetensors")
        config = {"num_heads": 4, "num_hidden_layers": 1, "hidden_size": 256, "vocab_size": 4096}
        (tmp_path / "config.json").write_text(json.dumps(config))
        llm = LLM("demo", speculative_config={"method": "medusa", "model": str(tmp_path), "adaptive": False})
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outputs = llm.generate(STORIES, params, use_tqdm=False)
        stats = llm.get_metrics().speculation
        assert stats is not None
        found.append(stats.num_accepted_tokens)
        if not truncated:
            plain = LLM("demo").generate(STORIES, params, use_tqdm=False)
            assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    assert found[0] > 200
    assert 10 < found[1] < found[0]


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({}, {"vocab_size": 4095}, "have a vocabulary of 4095, and the model 'demo' one of 4096"),
        ({}, {"hidden_size": 128}, "have a hidden size of 128, and the model 'demo' one of 256"),
        ({}, {"medusa_num_heads": 5}, "are 5 of 1 layers by config.json, and its tensors are of 4 of 1"),
        ({"0.1.weight": torch.ones(8, 256)}, {}, "have a vocabulary of 8, and the model 'demo' one of 4096"),
        ({"1.0.linear.weight": torch.ones(3, 256)}, {}, r"'1.0.linear.weight' as F32 \[3, 256\] in model"),
        ({"1.0.linear.bias": None}, {}, "lack 1 tensors: "),
        ({"scores": torch.ones(3)}, {}, "have a tensor 'scores' in model.safetensors"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], config: dict[str, Any], message: str
) -> None:
    method = heads(tmp_path, change, **config)
    with pytest.raises(ModelLoadError, match=message):
        LLM("demo", speculative_config=method)


def test_more_drafts_than_heads_are_refused() -> None:
    config = {"method": "medusa", "model": "demo-medusa", "num_speculative_tokens": 5}
    with pytest.raises(ModelLoadError, match=r"The heads 'demo-medusa' are 4, and each drafts one .* is 5. Lower it"):
        LLM("demo", speculative_config=config)


def test_damaged_heads_are_refused(tmp_path: Path) -> None:
    method = heads(tmp_path, {})
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelLoadError, match="model.safetensors is truncated or corrupt"):
        LLM("demo", speculative_config=method)
    with pytest.raises(ModelLoadError, match="/no/such/heads"):
        LLM("demo", speculative_config=method | {"model": "/no/such/heads"})


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_other_rules_judge_heads_too_and_are_repeatable_whatever_the_batch(acceptance: str) -> None:
    config = {"method": "medusa", "model": "demo-medusa", "acceptance": acceptance}
    llm = LLM("demo", speculative_config=config)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=40, ignore_eos=True) for i in range(len(STORIES))]
    together = llm.generate(STORIES, params, use_tqdm=False)
    stats = llm.get_metrics().speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 10 or acceptance == "rejection"
    for story, one, answer in zip(STORIES, params, together, strict=True):
        (alone,) = llm.generate(story, one, use_tqdm=False)
        assert alone.outputs[0].token_ids == answer.outputs[0].token_ids
