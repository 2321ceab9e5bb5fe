"""The folder of packed weights: a checkpoint's file in it, what a file says of itself, and how the folder stays small.

`quire.worker.weights.store` reads and writes the files; `quire cache` lists and clears them, which is why this knows no
torch. A file is the tensors, a manifest in JSON, the manifest's checksum and its length (8 bytes each, little-endian).
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.gguf import weight_files
from quire.config.model import ModelConfig
from quire.utils.logs import logger

FORMAT = 7  # raised when csrc/pack.h changes what is in a tile, or this file the manifest or its names
MIN_BYTES = 64 * 2**20  # smaller checkpoints are packed faster than they are worth a file
_SAMPLES = 256  # places all over a file of the checkpoint that are read to tell it from others
_SAMPLE = 4096  # bytes read at each
_STALE_SECONDS = 24 * 3600  # an unfinished file of a process that seems to live, but is of another machine
_TRAILER = 16
_MAX_MANIFEST = 256 * 2**20
_NO_ROOM = "packed weights are not kept on disk: %s has %d MiB free, and should have %d; set XDG_CACHE_HOME"
_MAX_STAMPS = 8  # copies of a checkpoint that share a file


@dataclass(frozen=True)
class StorePlace:
    """The file for one checkpoint in one format, and what it will say of itself.

    Attributes:
        path: the file.
        model: the checkpoint's name, as the user gave it.
        weights: the format of the weights, in words.
        directory: where the checkpoint is; the file, of a GGUF model.
        content: digest of samples of the checkpoint.
        stamp: [name, size, time in ns] of each file of it: what has another one is packed anew, under the same name.
        limit: bytes that all files in the folder may take.
        num_ranks: how many here share the checkpoint, each with a file of its part.
    """

    path: Path
    model: str = ""
    weights: str = ""
    directory: str = ""
    content: str = ""
    stamp: list[list[Any]] = field(default_factory=list)
    limit: int = 64 * 2**30
    num_ranks: int = 1


@dataclass(frozen=True)
class StoredWeights:
    """A file in the folder; all texts are empty where it can't be read or is of another version."""

    path: Path
    num_bytes: int
    used: float  # time of the last start that read or wrote it, in seconds since the epoch
    model: str
    weights: str
    directory: str
    content: str


def cache_folder() -> Path | None:
    """Where packed weights are kept; None for a user without a home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "quire" / "packed"
    try:
        return Path.home() / ".cache" / "quire" / "packed"
    except RuntimeError:  # no HOME, and no entry among the system's users
        return None


def place_of(config: ModelConfig, quantization: str | None, limit: int, part: Sequence[int | str]) -> StorePlace | None:
    """The place of a model's packed weights, of one rank's part where there are several, or None: see `find_place`."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    shapes = [getattr(config, name) for name in (*names, "tie_word_embeddings", "layer_windows")]
    rotated = [each.get("partial_rotary_factor") for each in (config.hf_config, config.rope_parameters)]
    head = [config.num_labels, config.hf_config.get("classifier_from_token")] if config.num_labels else []
    layout = json.dumps([config.architecture, config.dtype, quantization, shapes, rotated, *head, *part])
    weights = config.dtype if quantization is None else f"{quantization} ({config.dtype})"
    return find_place(weight_files(config.path), config.model, weights, layout, limit)


def find_place(files: Iterable[Path], model: str, weights: str, layout: str, limit: int) -> StorePlace | None:
    """The place of a checkpoint's packed weights; None where it is not worth one or has no room.

    Args:
        files: the checkpoint's *.safetensors.
        layout: all that decides what is in the file beside the checkpoint: shapes, format, and which rows rotate.
        model, weights, limit: see `StorePlace`.
    """
    files = sorted(files)
    folder = cache_folder()
    try:
        total = sum(file.stat().st_size for file in files)
        if not files or total < MIN_BYTES:
            return None
        if folder is None:
            logger.warning("packed weights are not kept on disk: this user has no home; set XDG_CACHE_HOME")
            return None
        stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        content = content_digest(files)
        name = hashlib.sha256(f"{FORMAT}\n{layout}\n{content}".encode()).hexdigest()[:32]
        own = files[0] if files[0].suffix.lower() == ".gguf" else files[0].parent  # which others lie beside
        place = StorePlace(folder / f"{name}.bin", model, weights, str(own.resolve()), content, stamp, limit)
        exists = next(parent for parent in [folder, *folder.parents] if parent.exists())
        if not place.path.exists() and (free := shutil.disk_usage(exists).free) < 2 * total:
            logger.warning(_NO_ROOM, folder, free >> 20, 2 * total >> 20)
            return None
    except OSError as error:
        logger.warning("packed weights are not kept on disk: %s: %s", error.filename or folder, error.strerror)
        return None
    return place


def same_stamp(one: Any, other: list[list[Any]]) -> bool:
    """Whether two stamps are of the same files; archives keep times in whole seconds, which count as the same."""
    if not isinstance(one, list) or len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(mine[:2] == theirs[:2] and _same_time(mine[2], theirs[2]) for mine, theirs in pairs)


def _same_time(one: int, other: int) -> bool:
    return one == other or (one // 10**9 == other // 10**9 and 0 in (one % 10**9, other % 10**9))


def known_stamp(manifest: dict[str, Any], stamp: list[list[Any]]) -> bool:
    """Whether a file was packed from the checkpoint of this stamp, or from another with the very same weights."""
    stamps = manifest.get("stamps")
    return isinstance(stamps, list) and any(same_stamp(one, stamp) for one in stamps)


def shared_stamps(place: StorePlace, tensors: list[dict[str, Any]]) -> list[Any]:
    """The stamp of `place`, and those of the file that is there where it holds the very same tensors.

    So two copies of a checkpoint, of other times, don't pack each other's anew for ever.
    """
    manifest = _manifest_or_empty(place.path)
    known = manifest.get("stamps", []) if manifest.get("tensors") == tensors else []
    return [place.stamp, *known][:_MAX_STAMPS]


def read_manifest(file: int) -> tuple[dict[str, Any], int]:
    """The manifest of an open file, and how many bytes of tensors stand before it.

    Raises:
        ValueError: it is damaged, or of another version. OSError: it can't be read.
    """
    size = os.fstat(file).st_size
    trailer = os.pread(file, _TRAILER, max(0, size - _TRAILER))
    length = int.from_bytes(trailer[8:], "little")
    if len(trailer) < _TRAILER or length > min(size - _TRAILER, _MAX_MANIFEST):
        raise ValueError("it has no manifest")
    content_bytes = size - _TRAILER - length
    text = os.pread(file, length, content_bytes)
    if zlib.crc32(text) != int.from_bytes(trailer[:8], "little"):
        raise ValueError("its manifest is damaged")
    manifest = json.loads(text)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError("it is of another version")
    return manifest, content_bytes


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """A manifest and its trailer, as they end a file."""
    text = json.dumps({"format": FORMAT} | manifest).encode()
    return text + zlib.crc32(text).to_bytes(8, "little") + len(text).to_bytes(8, "little")


def stored_weights(folder: Path) -> list[StoredWeights]:
    """Every file of `folder`, the one used last first."""
    found: list[StoredWeights] = []
    for path in folder.glob("*.bin"):
        with contextlib.suppress(OSError):
            stat, manifest = path.stat(), _manifest_or_empty(path)
            values = [str(manifest.get(name, "")) for name in ("model", "weights", "directory", "content")]
            found.append(StoredWeights(path, stat.st_size, stat.st_mtime, *values))
    return sorted(found, key=lambda each: each.used, reverse=True)


def make_room(place: StorePlace, num_bytes: int) -> bool:
    """Remove what a new file of `num_bytes` makes too much; False where it is over the limit, with the other ranks'.

    First goes what can't be read any more or holds the directory's earlier content, then what is not the newest of its
    directory (nor, with ranks, among as many), then the rest: always the one first that was not used for longest.
    """
    if num_bytes * place.num_ranks > place.limit:
        return False
    files = [each for each in stored_weights(place.path.parent) if each.path != place.path]
    seen = [place.directory]
    ranked: list[tuple[int, StoredWeights]] = []
    for each in files:  # the one used last first
        replaced = each.directory == place.directory and each.content != place.content
        most = place.num_ranks if each.directory == place.directory else 1
        ranked.append((0 if replaced or not each.directory else 1 if seen.count(each.directory) >= most else 2, each))
        seen.append(each.directory)
    total = num_bytes + sum(each.num_bytes for each in files)
    for rank, each in sorted(ranked, key=lambda pair: (pair[0], pair[1].used)):
        if rank == 0 or total > place.limit:
            logger.info("removing the packed weights of %s (%s)", each.model or "another version", each.path.name)
            remove(each.path)
            total -= each.num_bytes
    return True


def remove(path: Path) -> None:
    """Remove a file, if that is allowed; whoever has it open keeps what they read."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    """A name for an unfinished `path`, which tells whose it is."""
    return path.with_name(f"{path.stem}.{os.getpid()}.{time.monotonic_ns()}.partial")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A file that gets its name when the block has ended well; before that nothing is left of it, whatever happens."""
    partial = partial_name(path)
    try:
        file, named = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), False
    except (OSError, AttributeError):  # this file system or kernel has only files with names
        file, named = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666), True
    try:
        yield file
        if not named:
            os.link(f"/proc/self/fd/{file}", partial, src_dir_fd=file)  # the descriptor makes it follow the link
        os.replace(partial, path)
    except BaseException:
        remove(partial)
        raise
    finally:
        os.close(file)


def remove_partials(folder: Path) -> None:
    """Remove the unfinished files of processes that are gone."""
    for partial in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            pid = partial.name.split(".")[-3:-2]
            old = time.time() - partial.stat().st_mtime > _STALE_SECONDS
            if old or not (pid and pid[0].isdigit() and _lives(int(pid[0]))):
                partial.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:  # one that lives may be another user's
        return not isinstance(error, ProcessLookupError)
    return True


def _manifest_or_empty(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        return read_manifest(file.fileno())[0]
    return {}


def content_digest(files: list[Path]) -> str:
    """Of each file's header and size, and of samples all over it: a second's reading is saved."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            for i in range(1, _SAMPLES + 1):
                stream.seek(max(0, size * i // _SAMPLES - _SAMPLE))
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:32]
