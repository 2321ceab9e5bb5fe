"""Keeps a worker whose weights and KV cache come and go: it sleeps, wakes up, and takes other weights.

Executors have one where their worker is, and hand it the calls that name a method (`Invoke`). A worker that wakes up is
a new one, started as the first was, on the same device. Must not know who calls, nor plans.
"""

import ctypes
import gc
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.config.worker import WorkerConfig
from quire.errors import QuireError
from quire.protocol.worker import CallReply, Invoke, WorkerCall, WorkerReply
from quire.utils.logs import logger
from quire.worker.worker import Worker


class Keeper:
    """Has a worker, made of the same arguments, or none while it sleeps."""

    def __init__(self, config: WorkerConfig) -> None:
        self._first = self._config = config
        self._num_frozen, self._worker = gc.get_freeze_count(), Worker(config)
        self._place = self._worker.place

    @property
    def worker(self) -> Worker:
        """The worker that is awake."""
        assert self._worker is not None, "the worker sleeps"
        return self._worker

    def call(self, call: WorkerCall) -> WorkerReply:
        """Answer a call. Whatever a method raises is a reply, and so is a method that there is not."""
        if not isinstance(call, Invoke):
            return CallReply(None) if self._worker is None else self._worker.call(call)
        method = getattr(self if hasattr(Keeper, call.method) else self._worker, call.method, None)
        if call.method.startswith("_") or not callable(method):
            return CallReply(f"a worker{' that sleeps' * (self._worker is None)} has no method {call.method!r}.")
        try:
            value = method(*call.arguments)
            msgspec.msgpack.encode(value)  # now, as later nobody could tell the caller
            return CallReply(None, value)
        except (QuireError, OSError, MemoryError, TypeError) as error:
            return CallReply(f"{call.method}: {error}")
        except Exception as error:
            logger.exception("%s failed", call.method)
            return CallReply(f"{call.method}: {error!r}")

    def sleep(self, level: int) -> None:
        """Give back the memory of weights and KV cache; at level 2 forget where other weights came from, too."""
        self._drop()
        self._config = self._config if level == 1 else self._first

    def wake_up(self, tags: list[str]) -> None:
        """Load the weights again, if they are gone, and make the KV cache where that is among the tags."""
        if self._worker is None:
            self._worker = self._load(self._config)
        if "kv_cache" in tags and self._place.layout is not None:
            self._worker.cache_report()  # as at the start: ranks meet in it, and the disk's files are opened
            self._worker.initialize_cache(self._place.layout)

    def update_weights(self, path: str) -> None:
        """Load other weights, and then let go of those there are, and of the KV cache."""
        model = replace(self._first.model, path=Path(path), model=path)
        config = replace(self._first, model=model, weight_cache=False, load_format="auto")
        worker = self._load(config)
        self._drop()
        self._config, self._worker = config, worker

    def close(self) -> None:
        """Write to the disk what waits for it; safe to call twice."""
        if self._worker is not None:
            self._worker.close()

    def _load(self, config: WorkerConfig) -> Worker:
        worker = Worker(config, self._place)
        worker.load(progress=False)
        _trim_heap()  # what loading took, which would stay with every load
        return worker

    def _drop(self) -> None:
        self.close()
        self._worker = None
        gc.collect()
        if gc.get_freeze_count() > self._num_frozen:  # whoever serves a rank froze what it had, the worker too
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        self._place.device.available_bytes()  # a GPU's looks for it in the allocator, too
        _trim_heap()


def _trim_heap() -> None:
    """Give the system what is free of the heap, where the C library can be told to (not macOS's, nor musl)."""
    getattr(ctypes.CDLL(None), "malloc_trim", bool)(0)
