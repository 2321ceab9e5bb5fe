"""Where responses are kept: in memory, or in an SQLite file, which outlives the server.

`ResponsesService` calls it. A response has an owner, the client that made it, and for everybody else it is not there.
Knows nothing of what it keeps.
"""

import asyncio
import os
import sqlite3
import threading
import time
from collections import OrderedDict

from quire.errors import ConfigError, RequestFailedError
from quire.utils.logs import logger

_PURGE_SECONDS = 60.0  # between looks for what is too old
# Without the pages that are free again: the file does not shrink, but they are used first.
_NUM_BYTES = "SELECT (page_count - freelist_count) * page_size"
_NUM_BYTES += " FROM pragma_page_count, pragma_freelist_count, pragma_page_size"


def open_store(path: str | None, max_bytes: int | None, seconds: float) -> "MemoryStore | SqliteStore":
    """The store of the server's options.

    Args:
        path: the SQLite file; None: in memory.
        max_bytes: what the memory, or the file, may hold; 256 MiB or 16 GiB by default.
        seconds: how long a response is kept.

    Raises:
        ConfigError: the file can't be used.
    """
    limit = max_bytes if max_bytes is not None else 1 << (28 if path is None else 34)
    return MemoryStore(limit, seconds) if path is None else SqliteStore(path, limit, seconds)


class MemoryStore:
    """Keeps bytes by id and owner, in memory: where there is no more room, what was longest unused goes."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes, self._seconds = max_bytes, seconds
        self._entries: OrderedDict[str, tuple[str, float, bytes]] = OrderedDict()  # id -> (owner, end, data)
        self._num_bytes = 0

    async def put(self, key: str, owner: str, data: bytes) -> None:
        """Keep it, in place of what was there."""
        self._drop(key)
        self._entries[key] = (owner, time.monotonic() + self._seconds, data)
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    async def get(self, key: str, owner: str) -> bytes | None:
        """What is kept, if it is this owner's."""
        kept_for, end, data = self._entries.get(key, (None, 0.0, None))
        if time.monotonic() > end:
            self._drop(key)
        elif kept_for == owner:
            self._entries.move_to_end(key)
            return data
        return None

    async def delete(self, key: str, owner: str) -> None:
        """Forget it, if it is this owner's."""
        if await self.get(key, owner) is not None:
            self._drop(key)

    def _drop(self, key: str) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._num_bytes -= len(entry[2])


class SqliteStore:
    """The same in an SQLite file, from threads: the event loop never waits for the disk. What is oldest goes first.

    Raises:
        RequestFailedError: the file can't be read or written.
    """

    def __init__(self, path: str, max_bytes: int, seconds: float) -> None:
        self._max_bytes, self._seconds, self._next_purge, self._lock = max_bytes, seconds, 0.0, threading.Lock()
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # this user's only, as are SQLite's files beside it
            self._connection = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, owner TEXT, created REAL, data BLOB)"
            )
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"response_store {path!r} can't be used as an SQLite file ({error}).") from None

    async def put(self, key: str, owner: str, data: bytes) -> None:
        statement, now = "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)", time.time()
        await asyncio.to_thread(self._run, statement, key, owner, now, data)
        await asyncio.to_thread(self._make_room)
        if now >= self._next_purge:
            self._next_purge = now + _PURGE_SECONDS
            await asyncio.to_thread(self._run, "DELETE FROM responses WHERE created <= ?", now - self._seconds)

    async def get(self, key: str, owner: str) -> bytes | None:
        oldest = time.time() - self._seconds
        query = "SELECT data FROM responses WHERE id = ? AND owner = ? AND created > ?"
        rows = await asyncio.to_thread(self._run, query, key, owner, oldest)
        return rows[0][0] if rows else None

    async def delete(self, key: str, owner: str) -> None:
        await asyncio.to_thread(self._run, "DELETE FROM responses WHERE id = ? AND owner = ?", key, owner)

    def _make_room(self) -> None:
        # What is replaced gets a new number: the first is what was put there longest ago.
        while self._run(_NUM_BYTES)[0][0] > self._max_bytes and self._run("SELECT 1 FROM responses LIMIT 1"):
            self._run("DELETE FROM responses WHERE rowid = (SELECT MIN(rowid) FROM responses)")

    def _run(self, statement: str, *values: object) -> list[tuple]:
        try:
            with self._lock:
                return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            logger.error("the store of responses failed: %s", error)
            raise RequestFailedError(f"the store of responses failed ({error}); send it with store: false.") from None
