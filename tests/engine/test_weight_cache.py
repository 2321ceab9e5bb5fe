"""Packed weights between starts of a whole engine: mapped instead of packed, and equal in every token and logprob."""

import json
import logging
import os
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.attention.registry import select_backend
from quire.config.model import ModelConfig
from quire.config.worker import WorkerConfig
from quire.models.registry import build_model
from quire.ops.native.library import TORCH, levels
from quire.ops.native.matrix import PackedMatrix, orders_of
from quire.protocol.cache import CacheReport
from quire.utils.hub import resolve_model_path
from quire.worker.pages import HUGE_PAGE
from quire.worker.weights.store import WeightStore
from quire.worker.worker import Worker
from tests.pages import file_bytes, into_small_pages, needs_huge_pages
from tests.waiting import wait_until

PROMPTS = [[5, 9, 2, 77], [3] * 20, list(range(100, 150))]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: str) -> Path:
    """Where the files are to appear, for checkpoints of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("quire.worker.weights.cache.MIN_BYTES", 0)
    return tmp_path / "cache" / "quire" / "packed"


def fill(path: Path) -> None:
    """Write random weights beside a config.json."""
    shapes = build_model(
        ModelConfig.from_pretrained(str(path), load_format="dummy"), select_backend("reference")
    ).checkpoint_shapes()
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, family_dirs: dict[str, Path], tmp_path: Path) -> Path:
    """A checkpoint of random weights: with merged layers, or with biases and transposed matrices."""
    path = tmp_path / "model"
    path.mkdir()
    config = json.loads((family_dirs[request.param] / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config))
    fill(path)
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


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("family", "right", "wrong"),
    [
        ("glm4", {"head_dim": 16}, {"partial_rotary_factor": 1.0}),
        ("cohere2", {"sliding_window": 16, "sliding_window_pattern": 2}, {"sliding_window": None}),
    ],
)
def test_a_rotation_that_is_put_right_is_of_other_rows(
    cache: Path, model: Path, family: str, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """Rows that rotate together are brought together as they are packed: by config.json alone, files are the same."""
    config = json.loads((model / "config.json").read_text()) | {"architectures": None, "model_type": family} | right
    (model / "config.json").write_text(json.dumps(config))
    fill(model)
    plain = start(model, weight_cache=False)
    assert start(model, hf_overrides=wrong) != plain
    assert start(model) == plain


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_level_with_an_order_of_its_own_has_a_file_of_its_own(cache: Path, model: Path) -> None:
    """Sizes in the file may be the same: only its name tells the orders apart. Levels of one order share one."""
    owners = {tuple(orders_of(level)): level for level in levels() if orders_of(level)}
    if not owners:
        pytest.skip("this machine has no such level")
    plain = start(model, dtype="bfloat16", kernels="portable", weight_cache=False)
    for own in owners.values():
        start(model, dtype="bfloat16", kernels=own)
    assert start(model, dtype="bfloat16", kernels="portable") == plain
    assert len(files(cache)) == len(owners) + 1


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_draft_model_is_filled_too(cache: Path, model: Path, no_packing) -> None:
    draft = shutil.copytree(model, model.parent / "draft")
    tensors = load_file(draft / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, draft / "model.safetensors")
    speculative = {"method": "draft_model", "model": str(draft), "quantization": "int8"}
    plain = start(model, speculative_config=speculative, weight_cache=False)
    assert start(model, speculative_config=speculative) == plain
    assert len(files(cache)) == 2
    no_packing()
    assert start(model, speculative_config=speculative) == plain


@pytest.mark.parametrize("model", ["mixtral", "qwen2-moe", "gpt-oss", "gemma2"], indirect=True)
def test_experts_and_shared_tables_are_filled_too(cache: Path, model: Path, no_packing) -> None:
    plain = start(model, quantization="int8", weight_cache=False)
    start(model, quantization="int8")
    no_packing()
    assert start(model, quantization="int8") == plain


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
    assert len(files(cache)) == 1, "those of what was saved over are of no use to anybody"
    assert start(model, **OPTIONS[0]) == changed


def test_each_rank_has_a_file_of_its_part(cache: Path, model: Path) -> None:
    def load(rank: int, num_ranks: int) -> bool:
        config = ModelConfig.from_pretrained(str(model))
        worker = Worker(WorkerConfig(config, 16, 4, 64, rank=rank, num_ranks=num_ranks))  # it meets nobody
        worker.load(progress=False)
        for thread in threading.enumerate():
            if thread.name == "quire-weight-store":
                thread.join()
        return worker._store.filled

    ranks = [(0, 1), (0, 2), (1, 2)]
    assert [load(*rank) for rank in ranks] == [False] * 3
    assert len(files(cache)) == 3
    whole, *parts = sorted((path.stat().st_size for path in files(cache)), reverse=True)
    assert all(part < 0.7 * whole for part in parts)
    assert [load(*rank) for rank in ranks] == [True] * 3


def test_what_does_not_decide_the_content_makes_no_second_copy(cache: Path, model: Path, no_packing) -> None:
    plain = start(model)
    [file] = files(cache)
    no_packing()
    for overrides in ({"eos_token_id": 1}, {"rope_theta": 5000.0}):
        start(model, hf_overrides=overrides)
    assert files(cache) == [file]
    assert start(model) == plain


def test_a_checkpoint_saved_again_replaces_its_file(cache: Path, model: Path) -> None:
    start(model)
    [file] = files(cache)
    stat = file.stat()
    os.utime(model / "model.safetensors")
    start(model)
    assert files(cache) == [file], "packed anew, under the same name"
    assert file.stat().st_ino != stat.st_ino
    tensors = load_file(model / "model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 0.05}, model / "model.safetensors")
    start(model)
    [other] = files(cache)
    assert other != file


def test_the_second_start_plans_with_as_much_memory_as_the_first(
    cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped weights are page cache, which the system calls available."""
    sizes: list[int] = []

    def available(*arguments: Any) -> int:
        """As the system's: without the weights only where they are plain memory, at the first start."""
        return 2**24 - (sizes[0] if len(sizes) == 1 else 0)

    monkeypatch.setattr("quire.worker.devices.cpu.available_memory_bytes", available)
    real = WeightStore.finish

    def finish(store: WeightStore) -> None:
        sizes.append(store._size)
        real(store)

    monkeypatch.setattr(WeightStore, "finish", finish)
    planned_with: list[int] = []
    measure = Worker.cache_report

    def cache_report(worker: Worker) -> CacheReport:
        report = measure(worker)
        planned_with.append(report.available_bytes)
        return report

    monkeypatch.setattr(Worker, "cache_report", cache_report)
    for _ in range(2):
        LLM(str(model), skip_tokenizer_init=True, show_progress=False, max_num_batched_tokens=64, max_model_len=64)
        for thread in threading.enumerate():
            if thread.name == "quire-weight-store":
                thread.join()
        assert len(files(cache)) == 1
    assert planned_with == [2**24 - sizes[0]] * 2
    assert sizes[0] > 2**16


@pytest.mark.parametrize(
    "options", [{"weight_cache": False}, {"kernels": TORCH}, {"load_format": "dummy"}, {"dtype": "float16"}]
)
def test_starts_that_write_nothing(cache: Path, model: Path, options: dict[str, Any]) -> None:
    start(model, **options)
    assert not cache.parent.exists()


def test_a_small_checkpoint_is_packed_every_time(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.weights.cache.MIN_BYTES", 10**9)
    start(model)
    assert not cache.parent.exists()


@pytest.mark.parametrize("damage", ["truncated", "other weights", "overwritten", "empty"])
def test_a_bad_file_is_rebuilt(
    cache: Path, model: Path, damage: str, no_packing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    plain = start(model)
    [file] = files(cache)
    whole = file.read_bytes()
    length = int.from_bytes(whole[-8:], "little")
    if damage == "other weights":  # of another layout, under this name
        manifest = json.loads(whole[-16 - length : -16])
        manifest["tensors"][1]["shape"][0] += 1
        changed = json.dumps(manifest).encode()
        trailer = zlib.crc32(changed).to_bytes(8, "little") + len(changed).to_bytes(8, "little")
        file.write_bytes(whole[: -16 - length] + changed + trailer)
    elif damage == "overwritten":
        file.write_bytes(whole[:3000] + bytes(500) + whole[3500:])
        assert start(model) == plain
        assert f"the packed weights in {file} are damaged" in caplog.text
    else:
        file.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else b"")
        assert start(model) == plain
        assert f"the packed weights in {file} can't be used" in caplog.text
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


@needs_huge_pages
def test_what_a_second_start_maps_moves_to_huge_pages(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the KV cache is planned: what it takes is not missing there. The answers stay, and so does the file."""
    told: list[str] = []
    report, use = Worker.cache_report, WeightStore.use_huge_pages
    monkeypatch.setattr(Worker, "cache_report", lambda worker: [report(worker), told.append("planned")][0])
    monkeypatch.setattr(WeightStore, "use_huge_pages", lambda store, room: [use(store, room), told.append("moved")][0])
    model = resolve_model_path("demo")
    plain = start(model)
    [file] = files(cache)
    into_small_pages(file)
    content = file.read_bytes()
    told.clear()
    llm = LLM(str(model), skip_tokenizer_init=True, num_kv_blocks=64, show_progress=False)
    assert told == ["planned", "moved"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    wait_until(lambda: file_bytes(file) < 2 * HUGE_PAGE)  # the first and the last piece may be none
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)] == first
    assert [list(token_ids) for token_ids in first] == [token_ids for token_ids, _ in plain]
    assert file.read_bytes() == content
