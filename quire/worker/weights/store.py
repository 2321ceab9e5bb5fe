"""Where packed weights live: in a file of the user's cache, mapped as an earlier start left it, or in plain memory.

The first start packs into memory and then writes the file in a thread, under a name of its own until it is whole and on
the disk: processes that start together don't meet, and no half file is ever read. The name is made of the checkpoint's
content and of all that decides the layout. Called by the worker; knows no model.
"""

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from quire.worker.pages import huge_pages

logger = logging.getLogger(__name__)

FORMAT = 1  # raised when csrc/pack.h changes what is in a tile
MIN_BYTES = 64 * 2**20  # smaller checkpoints are packed faster than they are worth a file
_ALIGNMENT = 4096
_SAMPLE = 4096  # bytes read of each tensor's beginning, middle and end
_MADV_POPULATE_READ = 22  # maps all pages that are in memory or on the disk in one call, without copying them
_STALE_SECONDS = 24 * 3600  # an unfinished file of a process that died
_WRITE_BYTES = 8 * 2**20


class StaleStoreError(Exception):
    """The file is not what its name promises; it has been removed."""


class WeightStore:
    """Memory for packed weights, asked for in the same order at every start.

    Args:
        path: the file; None keeps everything in plain memory.

    Attributes:
        filled: the memory holds the weights already.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._manifest: list[dict[str, Any]] = []
        self._tensors: list[Tensor] = []  # flat bytes, in the manifest's order
        self._size = 0
        self._content_bytes = 0
        self._writer: threading.Thread | None = None
        self.filled = path is not None and self._open(path)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros, or where `filled` what was packed at this point of an earlier start.

        Raises:
            StaleStoreError: the file holds something else here.
        """
        num_bytes = max(1, dtype.itemsize * math.prod(shape))
        entry = {"shape": list(shape), "dtype": str(dtype), "offset": self._size}
        if self.filled:
            index = len(self._tensors)
            if self._manifest[index : index + 1] != [entry] or self._size + num_bytes > self._content_bytes:
                assert self.path is not None
                _remove(self.path)
                raise StaleStoreError
            flat = torch.frombuffer(self._mapped, dtype=torch.uint8, count=num_bytes, offset=self._size)
        else:
            flat = huge_pages((num_bytes,), torch.uint8)
            self._manifest.append(entry)
        self._tensors.append(flat)
        self._size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return flat.view(dtype).view(shape)

    def finish(self) -> None:
        """The weights are complete: keep them. Returns at once; a thread writes, and a script's exit waits for it."""
        if self.path is not None and not self.filled:
            self._writer = threading.Thread(target=self._write, args=(self.path,), name="quire-weight-store")
            self._writer.start()

    def settle(self) -> None:
        """Wait until nothing reads the weights to write them: before anyone may change them."""
        if self._writer is not None:
            self._writer.join()

    def _open(self, path: Path) -> bool:
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return False
        try:
            size = os.fstat(file).st_size
            length = int.from_bytes(os.pread(file, 8, size - 8), "little") if size >= 8 else -1
            if not 0 <= length <= size - 8:
                raise ValueError("no manifest")
            manifest = json.loads(os.pread(file, length, size - 8 - length))
            if not isinstance(manifest, list):
                raise ValueError("the manifest is no list")
            self._manifest, self._content_bytes = manifest, size - 8 - length
            # Private: what anyone writes to the weights stays in this process.
            self._mapped = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with contextlib.suppress(OSError, ValueError):  # before Linux 5.14: a fault for each page, later
                self._mapped.madvise(_MADV_POPULATE_READ)
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the packed weights in %s can't be used (%s): packing anew", path.name, error)
            self._manifest = []
            _remove(path)
            return False
        finally:
            os.close(file)
        with contextlib.suppress(OSError):  # a cache that is read-only serves as well
            os.utime(path)
        return True

    def _write(self, path: Path) -> None:
        partial = path.with_name(f"{path.stem}.{os.getpid()}.{time.monotonic_ns()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(path.parent)
            # In large writes: the kernel then keeps the file in large pages, and reads through them go twice as fast.
            with open(partial, "xb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, self._size)
                for entry, tensor in zip(self._manifest, self._tensors, strict=True):
                    content = memoryview(cast(Any, tensor.numpy()))
                    done = 0
                    while done < len(content):
                        done += os.pwrite(file.fileno(), content[done : done + _WRITE_BYTES], entry["offset"] + done)
                manifest = json.dumps(self._manifest).encode()
                os.pwrite(file.fileno(), manifest + len(manifest).to_bytes(8, "little"), self._size)
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            logger.warning("packed weights are not kept on disk: %s", error.strerror)
            _remove(partial)


def store_path(files: Iterable[Path], layout: str) -> Path | None:
    """The file for a checkpoint's packed weights; None where it is not worth one or has no room.

    Args:
        files: the checkpoint's *.safetensors.
        layout: all else that decides what is in the file (configuration, weight format).
    """
    files = sorted(files)
    total = sum(file.stat().st_size for file in files)
    if total < MIN_BYTES:
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "packed"
    exists = next(parent for parent in [base, *base.parents] if parent.exists())
    path = base / f"{_digest(files, layout)}.bin"
    if not path.exists() and shutil.disk_usage(exists).free < 2 * total:
        logger.info("no room to keep packed weights on disk")
        return None
    return path


def _digest(files: list[Path], layout: str) -> str:
    """Of the layout, and of each file's header, size, time and samples all over it: a second's reading is saved."""
    digest = hashlib.sha256(f"{FORMAT}\n{layout}\n".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{stat.st_size} {stat.st_mtime_ns}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            for i in range(1, 257):
                stream.seek(max(0, stat.st_size * i // 256 - _SAMPLE))
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:32]


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    for partial in folder.glob("*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                partial.unlink()
