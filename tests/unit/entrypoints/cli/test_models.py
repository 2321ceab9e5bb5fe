"""`quire models`, `pull`, `rm` and `show` on a cache in huggingface_hub's layout; nothing here touches the network."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi

from quire.entrypoints.cli import models
from quire.entrypoints.cli.main import main
from quire.utils.hub import resolve_model_path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no hub."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(models, "available_memory_bytes", lambda: 5 * 2**20)
    return folder


def add(cache: Path, name: str, files: dict[str, bytes | Path], commit: str = "a" * 40, kind: str = "models") -> Path:
    """Files as the hub's client keeps them: blobs, and links to them in a snapshot."""
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for number, (file, content) in enumerate(files.items()):
        blob = repository / "blobs" / f"{commit[:4]}{number}"
        shutil.copy(content, blob) if isinstance(content, Path) else blob.write_bytes(content)
        (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def demo(cache: Path) -> Path:
    source = resolve_model_path("demo")
    return add(cache, "Owner/Demo", {path.name: path for path in source.iterdir() if path.is_file()})


def test_what_is_in_the_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts: dict[str, bytes | Path] = {f"model-{n}.safetensors": b"x" * 3 * 2**20 for n in (1, 2)}
    add(cache, "b/large", {"config.json": b"{}", **parts})
    add(cache, "a/files", {"a-Q4.gguf": b"x" * 2**20, "a-Q8.gguf": b"x" * 8 * 2**20})
    add(cache, "c/small", {"model.safetensors": b"x" * 2**20})
    add(cache, "d/none", {"config.json": b"{}"})
    add(cache, "e/texts", {"data.json": b"{}"}, kind="datasets")
    assert main(["models"]) == 0
    *rows, total = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["MODEL", "FORMAT", "SIZE", "FITS"],
        ["a/files", "gguf", "9.0", "MiB", "yes"],
        ["b/large", "safetensors", "6.0", "MiB", "no"],
        ["c/small", "safetensors", "1.0", "MiB", "yes"],
        ["d/none", "no", "weights", "0.0", "MiB", "-"],
    ]
    assert " ".join(total) == "16.0 MiB on disk; 5.0 MiB of memory are free"


def test_an_empty_cache_and_one_that_can_not_be_read(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert capsys.readouterr().out == "0.0 MiB on disk; 5.0 MiB of memory are free\n"
    assert main(["rm", "a/b"]) == 2
    cache.write_text("a file")
    assert main(["models"]) == 2
    assert f"the hub's cache {cache} can't be read: " in capsys.readouterr().err


def test_a_user_without_a_home_is_told_of_hf_home(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scan(_: Any) -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("huggingface_hub.scan_cache_dir", scan)
    assert main(["models"]) == 2
    assert capsys.readouterr().err.endswith("home directory. HF_HOME names another.\n")


def test_removing_takes_all_revisions_of_a_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    add(cache, "Owner/Name", {"model.safetensors": b"x" * 2**20})
    add(cache, "Owner/Name", {"model.safetensors": b"y" * 2**20}, commit="b" * 40)
    add(cache, "Owner/Other", {"config.json": b"{}"})
    assert main(["rm", "Owner/Nam"]) == 2
    assert "'Owner/Nam' is not in the hub's cache. Did you mean 'Owner/Name'?" in capsys.readouterr().err
    assert main(["rm", "https://huggingface.co/Owner/Name"]) == 0
    assert capsys.readouterr().out == "removed 2.0 MiB\n"
    assert [path.name for path in cache.glob("models--*")] == ["models--Owner--Other"]
    assert len(list(cache.rglob("config.json"))) == 1  # of the same commit
    monkeypatch.setattr(models.shutil, "rmtree", refuse)
    assert main(["rm", "Owner/Other"]) == 2
    assert "models--Owner--Other can't be removed: Permission denied." in capsys.readouterr().err


def test_pulling_asks_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The hub is a function here: it writes what it would send."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(HfApi, "model_info", lambda *args, **kwargs: None)
    asked: list[tuple[str, Any]] = []

    def download(name: str, **kwargs: Any) -> str:
        asked.append((name, kwargs["local_files_only"]))
        return str(add(cache, name, {"model.safetensors": b"x"}))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert main(["pull", "hf.co/Owner/Name"]) == 0
    assert asked == [("Owner/Name", False)]
    path = Path(capsys.readouterr().out.strip())
    assert (path / "model.safetensors").read_bytes() == b"x"
    assert main(["models"]) == 0
    assert "Owner/Name" in capsys.readouterr().out


def test_pulling_what_is_not_to_be_had(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(cache, "Owner/Name", {"config.json": b"{}"})
    assert main(["pull", "owner/nam"]) == 1
    assert "Did you mean 'Owner/Name', which is in the cache?" in capsys.readouterr().err


def test_what_a_model_is(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = demo(cache)
    assert main(["show", "https://huggingface.co/Owner/Demo"]) == 0
    first, second, third, fourth, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("LlamaForCausalLM, ")
    assert first.endswith(f" layers, in {snapshot}")
    assert second.startswith("context of 512 tokens, vocabulary of ")
    assert third == "chat template: yes"
    assert fourth.startswith("Owner/Demo: ")
    assert "parameters" in fourth
    assert main(["show", "Owner/Demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "Owner/Demo"
    (snapshot / "chat_template.jinja").unlink(missing_ok=True)
    assert main(["show", "Owner/Dmo"]) == 1
