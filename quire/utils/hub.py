"""Where a model's files are: the bundled model, a local directory, or a repository of the Hugging Face hub.

Called by `quire.config.model` and the tokenizer's set-up. Turns every failure of the hub into a ModelLoadError that
says what to do. Must not know what the files hold; huggingface_hub is imported only when a hub id is asked for.
"""

import os
import re
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from quire.config.gguf import gguf_of_hub, local_gguf
from quire.errors import ModelLoadError
from quire.utils.suggest import nearest

CONFIG_PATTERNS = ("*.json", "*.jinja", "*.tiktoken", "merges.txt", "vocab.txt")
CONFIG_PATTERNS += ("tokenizer.model", "tokenizer.model.v*")
WEIGHT_PATTERNS = ("*.safetensors",)
HEAD_PATTERNS = ("config.json", "*.safetensors", "*.pt", "*.bin")  # heads that draft are mostly published as pickles

# Copies of the weights in other layouts, which some repositories carry beside the one that is read.
_IGNORE_PATTERNS = ("original/*", "consolidated*.safetensors", "*/*.safetensors", "*/*.json", "adapter_model*")
_BUNDLED = {"demo": Path("demo"), "demo-draft": Path("demo", "draft"), "demo-medusa": Path("demo", "medusa")}
_BUNDLED |= {"demo-eagle": Path("demo", "eagle"), "demo-eagle3": Path("demo", "eagle3")}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# A model's page, one of its folders or files, or Ollama's name for a file of it.
_SITE = r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
_FILE = r"(?:/(?:blob|resolve)/[^/]+/([^?#]+\.gguf)|:([^/?#]+))?"
_ADDRESS = re.compile(_SITE + r"([\w.-]+/[\w.-]+)" + _FILE + r"(?:[/?#].*)?", re.ASCII)
_TRUE = {"1", "ON", "YES", "TRUE"}
_METADATA_TIMEOUT = 10.0  # seconds for one answer of the hub


def resolve_model_path(
    model: str | os.PathLike[str],
    revision: str | None = None,
    *,
    cache_dir: str | Path | None = None,
    allow_patterns: tuple[str, ...] = CONFIG_PATTERNS + WEIGHT_PATTERNS,
) -> Path:
    """The local directory or .gguf file of `model`; a hub id is downloaded (only `allow_patterns`) unless it is cached.

    "demo" and "demo-draft" are the bundled models ("./demo" is a directory of that name). With HF_HUB_OFFLINE set
    only the cache is looked at. `revision` (branch, tag or commit) and `cache_dir` matter for hub ids only.

    Raises:
        ModelLoadError: nothing is there, or the hub can't be reached or refuses; the message has the remedy.
    """
    name = hub_id(os.fspath(model))
    if name in _BUNDLED:
        return _bundled(name)
    path = Path(os.path.expanduser(name))  # as it is where nobody has that home
    if name and (os.path.isdir(path) or local_gguf(path)):  # False where the name is too long, or access denied
        return local_gguf(path) or path
    repository, _, file = name.partition(":")
    if file and _HUB_ID.fullmatch(repository) and not set(file) & set("/\\*?["):  # a file, or owner/name:Q4_K_M
        return gguf_of_hub(file, name, partial(_download, repository, revision, cache_dir))
    if complaint := _complaint(name, path):
        raise ModelLoadError(f"Model {complaint}")
    return _download(name, revision, cache_dir, allow_patterns)


def hub_id(name: str) -> str:
    """`name`, or where it is the address of a model's page on the hub, or of a .gguf file there: its hub id."""
    address = _ADDRESS.fullmatch(name)
    return ":".join(part for part in address.groups() if part) if address else name


def _complaint(name: str, path: Path) -> str | None:
    """What is wrong with a name that is no directory's, where it can't be a hub id either."""
    if "://" in name:
        return f"{name!r} is an address; give a directory, or a hub id (owner/name)."
    if os.path.isfile(path):
        return f"{name!r} is a file; give the directory that holds config.json and *.safetensors."
    if not name or name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or name.endswith("/"):
        return f"directory {name!r} does not exist; check the path."
    if not _HUB_ID.fullmatch(name) or ".." in name or "--" in name:
        return f"{name!r} is neither a directory nor a hub id (owner/name)."
    return None


def _bundled(name: str) -> Path:
    path = Path(__file__).resolve().parent.parent / _BUNDLED[name]
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"The bundled model {name!r} is not in this installation: install the full package.")
    return path


def _download(name: str, revision: str | None, cache_dir: str | Path | None, allow_patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # here: it costs 0.3 s, and most models are local directories

    # Read at each call: huggingface_hub itself looks at the environment only when first imported.
    offline = any(os.environ.get(key, "").upper() in _TRUE for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    try:
        is_local = offline or not _hub_answers(name, revision)
        patterns: Any = {"allow_patterns": [*allow_patterns], "ignore_patterns": [*_IGNORE_PATTERNS]}
        where: Any = {"revision": revision, "cache_dir": cache_dir, "local_files_only": is_local}
        return Path(snapshot_download(name, **where, **patterns))
    except Exception as error:  # the hub's client lets its transport's and the disk's errors through
        raise ModelLoadError(f"Model {name!r}{_why(error, name, revision, offline)}") from error


def _why(error: Exception, name: str, revision: str | None, offline: bool) -> str:
    """Why a model can't be had from the hub, and what to do."""
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return " is gated: accept its licence on its hub page, then log in with `hf auth login` or set HF_TOKEN."
    if isinstance(error, errors.RevisionNotFoundError):
        return f" has no revision {revision!r} on the hub."
    if isinstance(error, errors.RepositoryNotFoundError):
        remedy = "check the spelling, or log in with `hf auth login` or set HF_TOKEN if it is private"
        return f" is neither a local directory nor a public repository of the hub; {remedy}.{_hint(name)}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        why, remedy = "the hub can't be reached", "check the network"
        if offline:
            why, remedy = "HF_HUB_OFFLINE forbids to download it", "unset HF_HUB_OFFLINE"
        return f"{at} is not, or not wholly, in the local cache, and {why}: {remedy}, or give a directory.{_hint(name)}"
    remedy = "set HF_HOME to a folder of your own" if isinstance(error, PermissionError | RuntimeError) else "try again"
    return f"{at} can't be downloaded ({getattr(error, 'strerror', None) or type(error).__name__}); {remedy}."


def _hint(name: str) -> str:
    """What a name that the hub does not have may have meant: a bundled model, or one that is in the cache."""
    from huggingface_hub import constants

    cached = [name[8:].replace("--", "/") for name in glob("models--*", root_dir=constants.HF_HUB_CACHE)]
    names = {each: each for each in cached}
    if "/" not in name:
        names = {each.rpartition("/")[2]: each for each in cached} | {each: each for each in _BUNDLED}
    if (close := nearest(name, names)) is None or names[close] == name:
        return "" if "/" in name else " Most models of the hub are named owner/name."
    return f" Did you mean {names[close]!r}, {'the bundled model' if close in _BUNDLED else 'which is in the cache'}?"


def _hub_answers(name: str, revision: str | None) -> bool:
    """Whether the hub can be reached; snapshot_download asks too, but on a dead network it waits for ever."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, revision=revision, timeout=_METADATA_TIMEOUT)
    except HfHubHTTPError:  # an answer, if a refusal: snapshot_download falls back on the cache or says why
        return True
    except Exception:  # whatever the transport raises
        return False
    return True
