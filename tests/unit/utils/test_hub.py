"""Where a model is found: bundled, local or in a hub cache laid out by hand; nothing here touches the network."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.utils import hub
from quire.utils.hub import hub_id, resolve_model_path

COMMIT = "a" * 40
PACKAGE = Path(hub.__file__).parent.parent


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def cache_with(directory: Path, name: str, files: dict[str, str], ref: str = "main") -> Path:
    """A hub cache that holds one snapshot of `name`."""
    repository = directory / ("models--" + name.replace("/", "--"))
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / ref).write_text(COMMIT)
    for file, text in files.items():
        (snapshot / file).write_text(text)
    return snapshot


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model_path(*args, **kwargs)
    return str(caught.value)


def test_local_directory_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    assert resolve_model_path(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model_path("owner/name") == Path("owner/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_path("~/owner") == tmp_path / "owner"


@pytest.mark.parametrize("name", ["./absent", "../absent", "/absent/model", "~/absent", "a/b/c", "absent/", "", "a\\b"])
def test_path_that_is_not_there(name: str) -> None:
    assert f"{name!r} does not exist" in refused(name)


@pytest.mark.parametrize("name", ["what is this", "a--b/c", "owner/na..me", "owner/näme", "-x", "owner/x\n"])
def test_what_is_neither_path_nor_hub_id(name: str) -> None:
    assert "neither a directory nor a hub id" in refused(name)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
        ("http://www.huggingface.co/Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B"),
        ("huggingface.co/Qwen/Qwen3-0.6B/blob/main/README.md?x=1", "Qwen/Qwen3-0.6B"),
        ("hf.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf.co/Qwen/Qwen3-0.6B-GGUF:Q4_K_M", "Qwen/Qwen3-0.6B-GGUF:Q4_K_M"),
        ("https://huggingface.co/a/b-GGUF/blob/main/b-Q4.gguf", "a/b-GGUF:b-Q4.gguf"),
        ("https://huggingface.co/a/b-GGUF/resolve/main/q4/b.gguf?download=true", "a/b-GGUF:q4/b.gguf"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("hf.co/alone", "hf.co/alone"),
    ],
)
def test_an_address_of_the_hub(address: str, name: str) -> None:
    assert hub_id(address) == name


def test_a_model_by_the_address_of_its_page(offline: None, tmp_path: Path) -> None:
    snapshot = cache_with(tmp_path, "owner/tiny", {"config.json": "{}"})
    assert resolve_model_path("https://huggingface.co/owner/tiny", cache_dir=tmp_path) == snapshot


def test_a_near_miss_of_what_is_in_the_cache(offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cache_with(tmp_path, "Qwen/Qwen3-0.6B", {})
    (tmp_path / "models--Qwen--Qwen3-0.6B" / "refs" / "main").unlink()
    hint = "Did you mean 'Qwen/Qwen3-0.6B', which is in the cache?"
    for name in ("qwen3-0.6b", "Qwen/Qwen-0.6B", "qwen3:0.6B"):
        assert refused(name).endswith(hint), name
    assert refused("Qwen/Qwen3-0.6B").endswith("or give a directory.")


def test_a_cache_that_may_not_be_entered_is_no_traceback(
    offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a HOME that a program was left with which then became another user."""

    known, cache = os.stat, str(tmp_path / "hub")

    def forbid(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path).startswith(cache):
            raise PermissionError(13, "Permission denied", path)
        return known(path, *args, **kwargs)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", cache)
    monkeypatch.setattr(os, "stat", forbid)
    assert refused("owner/name").endswith("or give a directory.")


def test_other_addresses_and_formats(tmp_path: Path) -> None:
    assert "is an address; give a directory, or a hub id (owner/name)" in refused("https://example.org/model")
    for name in ("x.gguf", str(tmp_path / "model-Q4.GGUF")):
        assert "does not exist; check the path, or give owner/name:file.gguf" in refused(name)


def test_a_name_without_an_owner_gets_a_hint(offline: None, tmp_path: Path) -> None:
    assert refused("demoo", cache_dir=tmp_path).endswith("Did you mean 'demo', the bundled model?")
    assert refused("llama3.2", cache_dir=tmp_path).endswith("Most models of the hub are named owner/name.")
    assert refused("owner/demo", cache_dir=tmp_path).endswith("or give a directory.")


def test_file_instead_of_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "is a file" in refused(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["/" + 300 * "a", "~/" + 300 * "a" + ".gguf"])
def test_a_name_that_no_file_system_has(name: str) -> None:
    assert "does not exist" in refused(name)


def test_bundled_models_come_before_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "package" / "utils" / "hub.py"))
    assert "'demo' is not in this installation" in refused("demo")
    for directory in ("demo", "demo/draft"):
        (tmp_path / "package" / directory).mkdir(parents=True)
        (tmp_path / "package" / directory / "config.json").touch()
    assert resolve_model_path("demo") == tmp_path / "package" / "demo"
    assert resolve_model_path("demo-draft") == tmp_path / "package" / "demo" / "draft"
    assert resolve_model_path("./demo") == Path("demo")


@pytest.mark.usefixtures("offline")
def test_cached_snapshot_is_found_offline(tmp_path: Path) -> None:
    text = '{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 9}'
    snapshot = cache_with(tmp_path, "owner/name", {"config.json": text})
    assert resolve_model_path("owner/name", cache_dir=tmp_path) == snapshot
    assert resolve_model_path("owner/name", COMMIT, cache_dir=tmp_path) == snapshot
    assert ModelConfig.from_pretrained("owner/name", download_dir=tmp_path).hidden_size == 8


def test_a_home_of_nobody_is_no_traceback() -> None:
    assert refused("~no-one/x") == "Model directory '~no-one/x' does not exist; check the path."


@pytest.mark.usefixtures("offline")
def test_what_is_not_cached_says_so_offline(tmp_path: Path) -> None:
    cache_with(tmp_path, "owner/name", {"config.json": "{}"}, ref="v1")
    assert resolve_model_path("owner/name", "v1", cache_dir=tmp_path).name == COMMIT
    message = refused("owner/name", "v2", cache_dir=tmp_path)
    assert "'owner/name' at revision 'v2'" in message
    assert "HF_HUB_OFFLINE" in message
    assert "HF_HUB_OFFLINE" in refused("owner/other", cache_dir=tmp_path)


def test_dead_network_falls_back_on_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked: list[dict[str, Any]] = []

    def model_info(self: Any, name: str, **kwargs: Any) -> None:
        asked.append(kwargs)
        raise TimeoutError

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    assert "the hub can't be reached" in refused("owner/name", cache_dir=tmp_path)
    snapshot = cache_with(tmp_path, "owner/name", {"config.json": "{}"})
    assert resolve_model_path("owner/name", cache_dir=tmp_path) == snapshot
    assert all(0 < kwargs["timeout"] <= 10 for kwargs in asked)


class Response:
    """What the hub's errors want to know of an HTTP response."""

    headers: dict[str, str] = {}
    request = None
    status_code = 403


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "_hub_answers", lambda name, revision: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "can't be downloaded (No space left on device)" in refused("owner/name", "v9")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (hub_errors.GatedRepoError, "accept its licence"),
        (hub_errors.RepositoryNotFoundError, "check the spelling"),
        (hub_errors.RevisionNotFoundError, "no revision 'v9'"),
        (hub_errors.HfHubHTTPError, "can't be downloaded (HfHubHTTPError)"),
        (OSError, "can't be downloaded (OSError)"),
        (RuntimeError, "can't be downloaded (RuntimeError); set HF_HOME"),
        (PermissionError, "can't be downloaded (PermissionError); set HF_HOME"),
    ],
)
def test_refusals_of_the_hub(monkeypatch: pytest.MonkeyPatch, error: type[Exception], remedy: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        hub_error = issubclass(error, hub_errors.HfHubHTTPError)
        raise error("https://secret.example/?token=x", **({"response": Response()} if hub_error else {}))

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "_hub_answers", lambda name, revision: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    message = refused("owner/name", "v9")
    assert remedy in message
    assert "'owner/name'" in message
    assert "secret" not in message


def test_only_what_is_read_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.safetensors",
        "pytorch_model.bin",
        "model.Q4.gguf",
        "modeling_evil.py",
        "README.md",
    ]
    fetched: list[str] = []

    def download(name: str, **kwargs: Any) -> str:
        patterns = {key: kwargs[key] for key in ("allow_patterns", "ignore_patterns")}
        fetched[:] = huggingface_hub.utils.filter_repo_objects(repository, **patterns)
        return str(tmp_path)

    monkeypatch.setattr(hub, "_hub_answers", lambda name, revision: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_path("owner/name") == tmp_path
    assert fetched == repository[:8]
    resolve_model_path("owner/name", allow_patterns=hub.CONFIG_PATTERNS)
    assert fetched == [name for name in repository[:8] if not name.endswith(".safetensors")]


def test_import_leaves_the_hub_client_alone() -> None:
    import subprocess

    code = "import sys, quire.utils.hub; assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
