"""`quire cache`: what it lists, what it clears, and what it refuses."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from quire.entrypoints.cli.main import main
from quire.worker.weights.cache import manifest_bytes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of two models, one of them in two formats, and a file of another version."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "quire" / "packed"
    folder.mkdir(parents=True)
    put(folder, "a", "owner/llama", "bfloat16", 3 * 2**20, 5)
    put(folder, "b", "owner/llama", "int4 (bfloat16)", 2**20, 3 * 3600)
    put(folder, "c", "/models/gpt2", "float32", 2**20, 50 * 3600)
    (folder / "d.bin").write_bytes(b"[]")
    os.utime(folder / "d.bin", (1, 1))
    return folder


def put(folder: Path, name: str, model: str, weights: str, num_bytes: int, age: float) -> None:
    about = {"model": model, "weights": weights, "directory": "/" + name, "content": name}
    (folder / f"{name}.bin").write_bytes(bytes(num_bytes) + manifest_bytes(about))
    used = time.time() - age
    os.utime(folder / f"{name}.bin", (used, used))


def names(folder: Path) -> str:
    return "".join(sorted(path.stem for path in folder.iterdir()))


def test_it_lists_models_formats_sizes_and_ages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["MODEL", "WEIGHTS", "SIZE", "LAST", "USED", "FILE"]
    assert lines[1].split() == ["owner/llama", "bfloat16", "3.0", "MiB", "just", "now", "a.bin"]
    assert lines[2].split() == ["owner/llama", "int4", "(bfloat16)", "1.0", "MiB", "3", "hours", "ago", "b.bin"]
    assert "/models/gpt2" in lines[3]
    assert "2 days ago" in lines[3]
    assert "(of another version)" in lines[4]
    assert lines[5] == f"5.0 MiB in 4 of {folder}"
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "left"),
    [(["owner/llama"], "cd"), (["c.bin"], "abd"), (["d"], "abc"), (["--all"], "")],
    ids=lambda value: "-".join(value).replace("/", "-"),
)
def test_it_clears_what_is_named(folder: Path, arguments: list[str], left: str) -> None:
    assert main(["cache", "clear", *arguments]) == 0
    assert names(folder) == left


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["clear"], "give --all"),
        (["clear", ""], "give --all"),
        (["clear", "owner/llama", "--all"], "give --all"),
        (["clear", "owner/lama"], "nothing of 'owner/lama' is kept. Did you mean 'owner/llama'?"),
        (["list", "a"], "'quire cache clear NAME' removes that one"),
    ],
    ids=len,
)
def test_it_removes_nothing_by_mistake(
    folder: Path, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert names(folder) == "abcd"


def test_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))
    assert main(["cache"]) == 0
    assert "0.0 MiB in 0 of" in capsys.readouterr().out
    assert main(["cache", "clear", "--all"]) == 0


def test_a_folder_that_is_closed_or_nobodys(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Path, pattern: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "glob", refuse)
    assert main(["cache"]) == 2
    assert f"{folder} can't be read: Permission denied." in capsys.readouterr().err
    monkeypatch.setattr("quire.entrypoints.cli.cache.cache_folder", lambda: None)
    assert main(["cache"]) == 2
    assert "nothing is kept: this user has no home" in capsys.readouterr().err


def test_it_needs_no_torch(folder: Path) -> None:
    code = "import sys\nfrom quire.entrypoints.cli.main import main\nmain(['cache'])\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_prefixes_on_the_disk_are_counted_and_cleared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for model, block in (("a" * 32, "12" * 32), ("b" * 32, "12" * 32), ("b" * 32, "34" * 32)):
        path = tmp_path / model / block[:2] / f"{block}.0.kv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(2**20))
    (tmp_path / "mine.kv").write_text("mine")
    main(["cache", "--kv-cache-dir", str(tmp_path)])
    assert "3.0 MiB in 3 blocks of 2 models" in capsys.readouterr().out
    assert main(["cache", "clear", "--kv-cache-dir", str(tmp_path)]) != 0
    assert "give --all" in capsys.readouterr().err
    with monkeypatch.context() as closed:
        closed.setattr("pathlib.Path.unlink", Mock(side_effect=PermissionError))
        assert main(["cache", "clear", "--all", "--kv-cache-dir", str(tmp_path)]) != 0
    shown = capsys.readouterr()
    assert (shown.out, "3 of 3 blocks can't be removed" in shown.err) == ("", True)
    main(["cache", "clear", "--all", "--kv-cache-dir", str(tmp_path)])
    assert "removed 3.0 MiB in 3 blocks" in capsys.readouterr().out
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["mine.kv"]
    assert main(["cache", "--kv-cache-dir", str(tmp_path / "nothing")]) != 0
    assert "is no folder" in capsys.readouterr().err
