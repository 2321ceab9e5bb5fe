"""Block files: KV blocks on the disk, each under the name of its content, for this engine and those that come after it.

The worker's disk tier asks; a thread of its own writes and reads, reads first, so that no step waits. A file is a
header, the block's bytes and a SHA-256 of both. The header has the fingerprint of everything that decides what is in a
block: a file of another model, or a damaged one, is counted and never used. Several engines may share a folder.
"""

import contextlib
import hashlib
import os
import queue
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import sub
from pathlib import Path

from quire.protocol.step import DiskNews
from quire.utils.logs import logger
from quire.worker.weights.cache import partial_name, remove, remove_partials

FORMAT = 1  # raised when what is in a block, or in its file, changes
MAX_QUEUED_BYTES = 256 * 2**20  # of blocks that wait to be written, were each one of the largest; more are not kept
CLOSING_SECONDS = 20.0  # to write what waits when the engine ends
_KEPT = 0.9  # of the limit, when room is made
_HEADER = struct.Struct("<8s32s32sII")  # magic, fingerprint, name, group, bytes
_MAGIC = b"QUIREKV" + bytes([FORMAT])
_CHECKSUM = 32
_READ, _WRITE, _END = range(3)  # jobs of the thread, in the order in which those that wait come next
_PLACE = re.compile(r"/[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{64}\.\d+\.kv$")


@dataclass(frozen=True)
class BlockFolder:
    """Where block files are, and which of them are meant.

    Attributes:
        path: the folder, for files of all models.
        fingerprint: 32 bytes; files of others are in folders of their own.
        limit: bytes that all files may take.
        block_bytes: by KV group.
    """

    path: Path
    fingerprint: bytes
    limit: int
    block_bytes: list[int]

    @property
    def own(self) -> Path:
        """The folder of this fingerprint's files."""
        return self.path / self.fingerprint.hex()[:32]

    def file(self, group: int, name: bytes) -> Path:
        """The file of a block."""
        text = name.hex()
        return self.own / text[:2] / f"{text}.{group}.kv"


@dataclass(frozen=True)
class BlockRead:
    """An answer: the block's bytes, or None where there is no such file, or not as it should be."""

    group: int
    host: int
    data: memoryview | None


class BlockFiles:
    """Writes, reads and removes the files of a folder; only the thread of its own does, once it is made.

    What can't be written is counted, and told once in the log; nothing here raises.
    """

    def __init__(self, folder: BlockFolder) -> None:
        self._folder = folder
        self._jobs = queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]]()  # None: the end
        self._order = count()
        self._answers = queue.SimpleQueue[BlockRead]()  # another one once nobody wants those any more
        self._num_reading = 0  # asked and not answered yet
        self._waiting: dict[tuple[int, bytes], memoryview] = {}  # group, name -> to be written; the thread takes out
        self._num_written = self._num_damaged = self._num_failed = self._num_removed = 0
        self._told = [0, 0, 0, 0]  # of them, in the order of `news`
        self._total = 0  # bytes in the folder, as far as is known
        self._is_full = False
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="quire-blocks", daemon=True)

    def start(self) -> list[list[bytes]]:
        """Look what there is, and begin; returns the names of this fingerprint's blocks, by group."""
        found: list[list[bytes]] = [[] for _ in self._folder.block_bytes]
        try:
            self._folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_partials(self._folder.path)
            for path, size, _ in self._scan():
                self._total += size
                if path.parent.parent == self._folder.own:
                    self._take_name(path, size, found)
        except OSError as error:
            self._warn(error)
        self._thread.start()
        return found

    # The worker's side.

    def write(self, group: int, name: bytes, data: memoryview) -> None:
        """Have a block written some time; its bytes must not change any more."""
        if (len(self._waiting) + 1) * max(self._folder.block_bytes) > MAX_QUEUED_BYTES:
            self._num_failed += 1
            return
        self._waiting[group, name] = data
        self._have_done(_WRITE, partial(self._write, group, name, data))

    def read(self, group: int, host: int, name: bytes) -> None:
        """Have a block read."""
        self._num_reading += 1
        self._have_done(_READ, partial(self._answer, self._answers, group, host, name))

    def answers(self, seconds: float) -> list[BlockRead]:
        """The blocks that were read since the last call, in the order of asking; waits so long for the first."""
        found: list[BlockRead] = []
        with contextlib.suppress(queue.Empty):
            if seconds and self._num_reading:
                found.append(self._answers.get(timeout=seconds))
            while True:
                found.append(self._answers.get_nowait())
        self._num_reading -= len(found)
        return found

    def forget_reads(self) -> None:
        """Nobody wants the answers to what was asked."""
        self._answers = queue.SimpleQueue()
        self._num_reading = 0

    def news(self, fetched: list[tuple[int, int, bool]]) -> DiskNews:
        """These answers, and the counts since the last call."""
        counts = [self._num_written, self._num_damaged, self._num_failed, self._num_removed]
        told, self._told = self._told, counts
        return DiskNews(fetched, *map(sub, counts, told))

    def close(self) -> None:
        """Write what waits, for some seconds at most, and end; safe to call twice."""
        self._have_done(_END, None)
        if self._thread.is_alive():
            self._thread.join(CLOSING_SECONDS)
            if self._thread.is_alive():
                logger.warning("kv_cache_dir: %s hangs, and what waits to be written may be lost", self._folder.path)

    def _have_done(self, kind: int, job: Callable[[], None] | None) -> None:
        self._jobs.put((kind, next(self._order), job))

    # The thread's side.

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            job()

    def _answer(self, answers: queue.SimpleQueue[BlockRead], group: int, host: int, name: bytes) -> None:
        if answers is not self._answers:  # they were forgotten
            return
        try:
            data = self._waiting.get((group, name)) or self._read(group, name)
        except Exception:  # whoever waits must have an answer
            logger.exception("a block could not be read")
            data = None
        answers.put(BlockRead(group, host, data))

    def _write(self, group: int, name: bytes, data: memoryview) -> None:
        self._waiting.pop((group, name), None)
        path = self._folder.file(group, name)
        header = _HEADER.pack(_MAGIC, self._folder.fingerprint, name, group, len(data))
        size = len(header) + len(data) + _CHECKSUM
        unfinished = partial_name(self._folder.path / path.name)
        try:
            if self._is_full or (self._total + size > self._folder.limit and not self._make_room(size)):
                self._is_full = True  # with what can't be removed: looking again would take long each time
                self._num_failed += 1
                return
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            digest = hashlib.sha256(header)
            digest.update(data)
            with unfinished.open("xb") as file:
                file.writelines((header, data, digest.digest()))
            unfinished.replace(path)
        except OSError as error:
            remove(unfinished)
            self._num_failed += 1
            self._warn(error)
            return
        self._total += size
        self._num_written += 1

    def _read(self, group: int, name: bytes) -> memoryview | None:
        path = self._folder.file(group, name)
        try:
            content = memoryview(path.read_bytes())
        except FileNotFoundError:  # another engine made room
            return None
        except OSError as error:
            self._warn(error)
            return None
        size = self._folder.block_bytes[group]
        header = _HEADER.pack(_MAGIC, self._folder.fingerprint, name, group, size)
        body = content[: len(header) + size]
        is_its = len(content) == len(body) + _CHECKSUM and content[: len(header)] == header
        if not is_its or hashlib.sha256(body).digest() != content[len(body) :]:
            self._num_damaged += 1
            remove(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # those not used for longest are removed first
        return body[len(header) :]

    def _make_room(self, size: int) -> bool:
        """Remove the files that were not used for longest, of whatever model; False where none would be enough."""
        if size > self._folder.limit:
            return False
        files = sorted(self._scan(), key=lambda each: each[2])
        self._total = sum(each[1] for each in files)
        for path, num_bytes, _ in files:
            if self._total + size <= self._folder.limit * _KEPT or self._total == 0:
                break
            remove(path)
            self._total -= num_bytes
            self._num_removed += 1
        return self._total + size <= self._folder.limit

    def _scan(self) -> list[tuple[Path, int, float]]:
        """All block files, with bytes and time of last use."""
        found: list[tuple[Path, int, float]] = []
        for path in block_paths(self._folder.path):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((path, stat.st_size, stat.st_mtime))
        return found

    def _take_name(self, path: Path, size: int, found: Sequence[list[bytes]]) -> None:
        text, _, group = path.stem.partition(".")
        sizes = self._folder.block_bytes
        if int(group) < len(sizes) and size == _HEADER.size + sizes[int(group)] + _CHECKSUM:
            found[int(group)].append(bytes.fromhex(text))
        else:
            self._num_damaged += 1
            remove(path)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("kv_cache_dir: blocks can't all be kept on the disk (%s); serving goes on", error.strerror)


def block_paths(folder: Path) -> Iterator[Path]:
    """The block files in a folder, of all models; other files are none of ours."""
    return (path for path in folder.glob("*/*/*.kv") if _PLACE.search(path.as_posix()))
