"""Packed weights between starts of a whole engine: mapped instead of packed, and equal in every token and logprob."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.attention.registry import select_backend
from quire.config.model import ModelConfig
from quire.models.registry import build_model
from quire.ops.native.library import TORCH
from quire.ops.native.matrix import PackedMatrix

PROMPTS = [[5, 9, 2, 77], [3] * 20, list(range(100, 150))]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: str) -> Path:
    """Where the files are to appear, for checkpoints of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("quire.worker.weights.store.MIN_BYTES", 0)
    return tmp_path / "cache" / "quire" / "packed"


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, family_dirs: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint of random weights: with merged layers, or with biases and transposed matrices."""
    path = tmp_path / "model"
    path.mkdir()
    config = json.loads((family_dirs[request.param] / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config))
    shapes = build_model(
        ModelConfig.from_pretrained(str(path), load_format="dummy"), select_backend("reference")
    ).checkpoint_shapes()
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    return path


def start(model: Path, **options: Any) -> list[Any]:
    """Start an engine, generate, and wait for what it writes: all that a user sees."""
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 64, "show_progress": False}
    llm = LLM(str(model), **(settings | options))
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for thread in threading.enumerate():
        if thread.name == "quire-weight-store":
            thread.join()
    return [
        (list(o.outputs[0].token_ids), [{t: x.logprob for t, x in s.items()} for s in o.outputs[0].logprobs or []])
        for o in outputs
    ]


def files(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.exists() else []


@pytest.fixture
def no_packing(monkeypatch: pytest.MonkeyPatch):
    """From its call on, a start that packs weights fails."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("weights were packed again")

    return lambda: monkeypatch.setattr(PackedMatrix, "pack", refuse)


OPTIONS: list[dict[str, str]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float32"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
def test_the_second_start_is_filled(cache: Path, model: Path, options: dict[str, str], no_packing) -> None:
    plain = start(model, weight_cache=False, **options)
    assert files(cache) == []
    assert start(model, **options) == plain
    [file] = files(cache)
    no_packing()
    assert start(model, **options) == plain
    assert files(cache) == [file]


def test_a_checkpoint_without_prefixes_is_filled_too(cache: Path, model: Path, no_packing) -> None:
    """As GPT-2's own: `wte.weight` for `transformer.wte.weight`."""
    tensors = load_file(model / "model.safetensors")
    short = {name.removeprefix("transformer.").removeprefix("model."): t for name, t in tensors.items()}
    save_file(short, model / "model.safetensors")
    plain = start(model)
    no_packing()
    assert start(model) == plain


def test_each_format_and_checkpoint_has_its_file(cache: Path, model: Path) -> None:
    answers = [start(model, **options) for options in OPTIONS]
    assert len(files(cache)) == len(OPTIONS)
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if "wte" in name or "embed" in name)
    tensors[name] = tensors[name] + 0.05
    save_file(tensors, model / "model.safetensors")
    changed = start(model, **OPTIONS[0])
    assert changed != answers[0]
    assert len(files(cache)) == len(OPTIONS) + 1
    assert start(model, **OPTIONS[0]) == changed


@pytest.mark.parametrize(
    "options", [{"weight_cache": False}, {"kernels": TORCH}, {"load_format": "dummy"}, {"dtype": "float16"}]
)
def test_starts_that_write_nothing(cache: Path, model: Path, options: dict[str, Any]) -> None:
    start(model, **options)
    assert not cache.parent.exists()


def test_a_small_checkpoint_is_packed_every_time(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.weights.store.MIN_BYTES", 10**9)
    start(model)
    assert not cache.parent.exists()


@pytest.mark.parametrize("damage", ["truncated", "other weights", "empty"])
def test_a_bad_file_is_rebuilt(
    cache: Path, model: Path, damage: str, no_packing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    plain = start(model)
    [file] = files(cache)
    whole = file.read_bytes()
    length = int.from_bytes(whole[-8:], "little")
    if damage == "other weights":  # of another layout, under this name
        manifest = json.loads(whole[-8 - length : -8])
        manifest[1]["shape"][0] += 1
        changed = json.dumps(manifest).encode()
        file.write_bytes(whole[: -8 - length] + changed + len(changed).to_bytes(8, "little"))
    else:
        file.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else b"")
        assert start(model) == plain
        assert f"the packed weights in {file.name} can't be used" in caplog.text
    assert start(model) == plain
    assert file.read_bytes() == whole, "rebuilt as it was"
    no_packing()
    assert start(model) == plain


def test_an_unusable_cache_is_no_failure(cache: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = start(model, weight_cache=False)
    cache.parent.parent.write_text("a file where the cache's directory should be")
    assert start(model) == plain
    assert "packed weights are not kept on disk" in caplog.text


def test_weights_changed_by_the_user_stay_out_of_the_file(cache: Path, model: Path, no_packing) -> None:
    """`apply_model` waits for the writer, and a filled start maps the file privately."""
    plain = start(model)
    [file] = files(cache)
    whole = file.read_bytes()
    file.unlink()

    def clear(module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            parameter.zero_()

    for _ in range(2):  # the first one writes the file, the second one reads it
        llm = LLM(str(model), skip_tokenizer_init=True, num_kv_blocks=64, show_progress=False)
        llm.apply_model(clear)
        assert file.read_bytes() == whole
        no_packing()
    assert start(model) == plain
