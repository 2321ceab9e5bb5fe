"""Where packed weights live: in a file of the user's cache, mapped as an earlier start left it, or in plain memory; and
in huge pages, as far as the system has any.

The first start packs into memory and then writes the file in a thread; it gets its name when it is whole, so that
processes that start together don't meet, and no half file is ever read. Each tensor's checksum is verified before it is
used, by threads that sum while the model is built. Called by the worker; knows no model.
"""

import contextlib
import math
import mmap
import os
import sys
import threading
import weakref
import zlib
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from quire.ops.native.library import library
from quire.utils.logs import logger
from quire.worker.pages import HUGE_PAGE, huge_pages
from quire.worker.weights import cache
from quire.worker.weights.cache import StorePlace

Pages = Callable[[tuple[int, ...], torch.dtype], Tensor]
_ALIGNMENT = 4096
# Pages are to be huge where they are read from the disk; then all are mapped in one call, without copying them.
_MADV_HUGEPAGE, _MADV_POPULATE_READ = 14, 22
_SUMMED = 512  # words of 8 bytes whose sum is one number of a checksum


class StaleStoreError(Exception):
    """The file is not what its name promises; it has been removed."""


class WeightStore:
    """Memory for packed weights, asked for in the same order at every start.

    Args:
        place: the file; None keeps everything in plain memory.
        pages: makes that memory.

    Attributes:
        filled: the memory holds the weights already.
    """

    def __init__(self, place: StorePlace | None, pages: Pages = huge_pages) -> None:
        self.place = place
        self._pages = pages
        self._entries: list[dict[str, Any]] = []
        self._tensors: list[Tensor] = []  # flat bytes, in the entries' order
        self._sums: list[Future[int]] = []  # of those that are mapped
        self._summers = ThreadPoolExecutor(2)  # one does not read as fast as memory
        self._size = self._content_bytes = 0
        self._writer: threading.Thread | None = None
        self._stay: Callable[[], object] = bool  # has what is mapped stay where it is
        self.filled = place is not None and self._open(place)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights that are a mapped file, which the system counts as memory that it could free."""
        return self._content_bytes if self.filled else 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, name: str = "") -> Tensor:
        """Zeros, or where `filled` what was packed at this point of an earlier start.

        Args:
            name: of the layer and its tensor, which has to be the same at every start.

        Raises:
            StaleStoreError: the file holds something else here, or is damaged.
        """
        num_bytes = max(1, dtype.itemsize * math.prod(shape))
        entry = {"name": name, "shape": list(shape), "dtype": str(dtype), "offset": self._size}
        flat = self._mapped_tensor(entry, num_bytes) if self.filled else self._pages((num_bytes,), torch.uint8)
        if not self.filled:
            self._entries.append(entry)
        self._tensors.append(flat)
        self._size += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return flat.view(dtype).view(shape)

    def verified(self) -> "WeightStore":
        """The store, all of which is allocated, once what is mapped has been read (StaleStoreError: it is damaged)."""
        for kept, found in zip(self._entries, self._sums, strict=False):
            if self.place is not None and found.result() != kept.get("checksum"):
                path, name = self.place.path, kept["name"]
                logger.warning("the packed weights in %s are damaged (tensor %s): packing anew", path, name)
                cache.remove(path)
                raise StaleStoreError
        self._summers.shutdown()
        return self

    def finish(self) -> None:
        """The weights are complete: keep them. Returns at once; a thread writes, and a script's exit waits for it."""
        if self.place is not None and not self.filled:
            self._writer = threading.Thread(target=self._write, args=(self.place,), name="quire-weight-store")
            self._writer.start()

    def use_huge_pages(self, available_bytes: Callable[[], int]) -> None:
        """Have what is mapped moved to huge pages, by and by: most systems keep files in small ones, which are slower.

        It takes as many bytes more, of those that can be had now, and is for when all else is planned. Nothing moves
        unless there are twice as many: the file is to stay in memory, too, for the next start.
        """
        if self.filled and self._tensors and available_bytes() > 2 * len(self._mapped) and (found := library()):
            self._stay = weakref.finalize(self, found.quire_huge_pages, address := self._tensors[0].data_ptr(), 0)
            found.quire_huge_pages(address, len(self._mapped))

    def settle(self) -> None:
        """Wait until nothing reads the weights to write them elsewhere: before anyone may change them."""
        self._stay()
        if self._writer is not None:
            self._writer.join()

    def _mapped_tensor(self, entry: dict[str, Any], num_bytes: int) -> Tensor:
        assert self.place is not None
        kept = self._entries[len(self._tensors) : len(self._tensors) + 1]
        same = [isinstance(each, dict) and each | {"checksum": 0} for each in kept] == [entry | {"checksum": 0}]
        if same and self._size + num_bytes <= self._content_bytes:
            flat = torch.frombuffer(self._mapped, dtype=torch.uint8, count=num_bytes, offset=self._size)
            self._sums.append(self._summers.submit(checksum, flat))
            return flat
        cache.remove(self.place.path)
        raise StaleStoreError

    def _open(self, place: StorePlace) -> bool:
        try:
            file = os.open(place.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            manifest, self._content_bytes = cache.read_manifest(file)
            entries = manifest.get("tensors")
            if not isinstance(entries, list):
                raise ValueError("it lists no tensors")
            if not cache.known_stamp(manifest, place.stamp):
                logger.info("%s has changed on disk: packing its weights anew", place.model)
                return False
            self._entries = entries
            # Private: what anyone writes to the weights stays in this process.
            self._mapped = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_READ):  # what comes from the disk, comes in huge pages
                with contextlib.suppress(OSError, ValueError):  # before Linux 5.14: a fault for each page, later
                    self._mapped.madvise(advice)
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the packed weights in %s can't be used (%s): packing anew", place.path, error)
            self._entries = []
            cache.remove(place.path)
            return False
        finally:
            os.close(file)
        with contextlib.suppress(OSError):  # a cache that is read-only serves as well
            os.utime(place.path)
        return True

    def _write(self, place: StorePlace) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            place.path.parent.mkdir(parents=True, exist_ok=True)
            cache.remove_partials(place.path.parent)
            if not cache.make_room(place, self._size):
                gib = self._size * place.num_ranks / 2**30, place.limit / 2**30
                logger.warning("packed weights are not kept on disk: %.1f GiB > weight_cache_size=%.1f; raise it", *gib)
                return
            with cache.new_file(place.path) as file:
                self._write_to(file, place)
        except OSError as error:
            logger.warning("packed weights are not kept on disk: %s: %s", place.path.parent, error.strerror)

    def _write_to(self, file: int, place: StorePlace) -> None:
        if hasattr(os, "posix_fallocate"):  # a full disk is told of at once; macOS lacks it
            os.posix_fallocate(file, 0, self._size)
        parts, offset = list(self._parts(place)), 0
        starts = list(accumulate(map(len, parts), initial=0))
        # What is written stays in memory, in pages as large as one call fills: the next start finds huge ones there.
        while offset < starts[-1]:
            end = (offset // HUGE_PAGE + 1) * HUGE_PAGE
            among = range(bisect(starts, offset) - 1, min(bisect_left(starts, end), len(parts)))
            views = (parts[i][max(0, offset - starts[i]) : end - starts[i]] for i in among)
            offset += os.pwritev(file, [view for view in views if view], offset)

    def _parts(self, place: StorePlace) -> Iterator[memoryview]:
        """The file: tensors, what fills the last page of each, and a manifest."""
        for entry, tensor in zip(self._entries, self._tensors, strict=True):
            entry["checksum"] = checksum(tensor)
            yield memoryview(cast(Any, tensor.numpy()))
            yield memoryview(bytes(-len(tensor) % _ALIGNMENT))
        about = {name: getattr(place, name) for name in ("model", "weights", "directory", "content")}
        about |= {"stamps": cache.shared_stamps(place, self._entries), "tensors": self._entries}
        yield memoryview(cache.manifest_bytes(about))


def checksum(flat: Tensor) -> int:
    """Of uint8 [N]: of the sums of its pages, which are nearly as fast as memory, and of the rest.

    numpy sums them, on the thread that asks; torch has its own meet for each, and spin on busy cores.
    """
    whole = flat.numel() // (8 * _SUMMED) * (8 * _SUMMED)
    sums = flat[:whole].view(torch.int64).view(-1, _SUMMED).numpy().sum(1)
    return zlib.crc32(memoryview(cast(Any, sums)), zlib.crc32(memoryview(cast(Any, flat[whole:].numpy()))))
