"""What files say of a model before it is loaded: the room that it takes, as a plan has it, and damages."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli.plan import make_plan
from quire.entrypoints.server.room import Room, num_parameters, read_room
from quire.errors import ModelLoadError, QuireError
from quire.utils.hub import resolve_model_path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"quantization": "int4", "block_size": 16},
        {"dtype": "float32"},
    ],
)
def test_the_room_is_what_a_plan_finds(options: dict[str, Any]) -> None:
    args = EngineArgs(model="demo", num_kv_blocks=64, **options)
    room, share = read_room(args, 0)[1], make_plan(args).shares[0]
    assert room.weights == pytest.approx(share.weights, rel=0.05)
    assert room.kv_cache == pytest.approx(share.kv_cache, rel=0.05)


def test_parameters_are_those_of_the_model(tmp_path: Path) -> None:
    path = resolve_model_path("demo")
    counted = make_plan(EngineArgs(model="demo", num_kv_blocks=64)).worker.num_parameters
    converted = _tests_file("gguf_files").convert(path, tmp_path / "demo.gguf", split=9)
    assert num_parameters(path) == num_parameters(converted) == counted
    assert num_parameters(tmp_path / "empty") == 0


def _tests_file(name: str) -> Any:
    """A module that lies in tests/ itself."""
    sys.path.insert(0, str(Path(__file__).parents[3]))
    return importlib.import_module(name)


@pytest.mark.parametrize("case", ["gptq-4", "fp8-channel"])
def test_quantized_checkpoints_take_what_their_files_do(tmp_path: Path, case: str) -> None:
    files = _tests_file("quantized_files")
    files.write(tmp_path, *files.CASES[case])
    args = EngineArgs(model=str(tmp_path), num_kv_blocks=64)
    assert read_room(args, 0)[1].weights == pytest.approx(make_plan(args).shares[0].weights, rel=0.15)


def test_what_else_decides() -> None:
    alone, drafted = (
        read_room(EngineArgs(model="demo", speculative_config=config, gpu_memory_utilization=0.1), 1000)[1]
        for config in (None, {"method": "draft_model", "model": "demo-draft"})
    )
    assert drafted.weights > alone.weights
    assert alone.kv_cache == 100
    assert read_room(EngineArgs(model="demo", load_format="dummy", kv_cache_memory=2**20), 0)[1] == Room(0, 2**20)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(resolve_model_path("demo"), tmp_path / "copy", ignore=lambda *_: ["draft", "medusa"])
    return tmp_path / "copy"


def _write_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)


def _truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2**20)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: _write_config(folder, architectures=["MambaForCausalLM"], model_type="mamba"), "Mamba"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (_truncate, "truncated or corrupt"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no tensors"), "truncated or corrupt"),
        (
            lambda folder: _index(folder, '{"weight_map": {"a": "model-2.safetensors"}}'),
            "missing shards: model-2.safetensors",
        ),
        (lambda folder: _index(folder, "[]"), "must hold a JSON object"),
        (lambda folder: _index(folder, "{}"), "no 'weight_map'"),
        (lambda folder: _index(folder, "{"), "index"),
    ],
)
def test_damages_are_told(copy: Path, damage: Callable[[Path], Any], told: str) -> None:
    args = EngineArgs(model=str(copy))
    assert read_room(args, 0)[1].weights
    damage(copy)
    with pytest.raises(ModelLoadError, match=told):
        read_room(args, 0)


def test_options_that_an_engine_refuses_are_refused() -> None:
    with pytest.raises(QuireError, match="max_model_len"):
        read_room(EngineArgs(model="demo", max_model_len=10**6), 0)
