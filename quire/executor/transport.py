"""Messages through shared memory between processes of one machine: one writer, several readers, each gets them all.

The processes executor and its workers use it. A message is bytes; one larger than the memory goes in parts. Who waits
looks again for some microseconds, and then sleeps in the kernel. A writer or a reader that is interrupted anywhere
leaves whole parts behind, and what is incomplete is dropped when the next message begins. Must not know what is said.
"""

import ctypes
import mmap
import platform
import struct
import time
from collections.abc import Callable

_LINE = 8  # words of a cache line
_PAGE = 4096
_CAPACITY = 2**20  # bytes of a pipe
PIPE_BYTES = _PAGE + _CAPACITY  # that a pipe takes
_MOST = _CAPACITY // 2  # of a part, header and padding aside
_HEADER = struct.Struct("=IHBB")  # bytes of the part, kind, whether the message begins here, whether it goes on
_SPIN_SECONDS = 40e-6
_PAUSE = 100e-6  # where there is nothing to sleep on
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # the system call's number
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1
_libc = ctypes.CDLL(None)
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, *[ctypes.c_long] * 2, *[ctypes.c_void_p] * 2, ctypes.c_long]


class Pipe:
    """One end of a stream of messages.

    Args:
        memory: the shared memory.
        start: of the pipe in it; whole pages.
        reader: this end's number among the readers; the writer is none.
        num_readers: how many there are.
    """

    def __init__(self, memory: mmap.mmap, start: int, num_readers: int, reader: int) -> None:
        whole = memoryview(memory)
        self._words = whole[start : start + _PAGE].cast("q")  # bytes written, then each reader's, a line apart
        self._data = whole[start + _PAGE : start + _PAGE + _CAPACITY]
        self._tails = range(_LINE, _LINE * (1 + num_readers), _LINE)
        self._tail = self._tails[reader]
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory, start))
        self._parts = bytearray()

    def write(self, kind: int, body: bytes, check: Callable[[], object] = int) -> None:
        """Send a message to all readers; where they lag behind, `check` is called now and then (and may raise)."""
        rest, first = memoryview(body), True
        while first or rest:
            part, rest = rest[:_MOST], rest[_MOST:]
            size = _padded(len(part))
            while _CAPACITY - (self._words[0] - min(self._words[tail] for tail in self._tails)) < size:
                check()
                time.sleep(_PAUSE)
            head = self._words[0]
            self._put(head, _HEADER.pack(len(part), kind, first, bool(rest)))
            self._put(head + _HEADER.size, part)
            _wake(self._address)  # for its fence, which some CPUs need: nobody sees the count before what it counts
            self._words[0] = head + size
            _wake(self._address)
            first = False

    def read(self, seconds: float) -> tuple[int, bytearray] | None:
        """The next message: its kind and its bytes; None where none comes in that time."""
        end = time.perf_counter() + seconds
        while True:
            tail = self._words[self._tail]
            if self._words[0] == tail and not self._await(tail, end):
                return None
            size, kind, first, more = _HEADER.unpack(self._get(tail, _HEADER.size))
            if first:
                self._parts = bytearray()
            self._parts += self._get(tail + _HEADER.size, size)
            self._words[self._tail] = tail + _padded(size)
            if not more:
                return kind, self._parts

    def _await(self, tail: int, end: float) -> bool:
        """Wait until there is more than `tail` bytes; False where the time is over first."""
        spun = time.perf_counter() + _SPIN_SECONDS
        while self._words[0] == tail:
            if (now := time.perf_counter()) >= end:
                return False
            if now >= spun:
                _sleep(self._address, tail, end - now)
        return True

    def _put(self, position: int, part: bytes | memoryview) -> None:
        start = position % _CAPACITY
        before = min(len(part), _CAPACITY - start)
        self._data[start : start + before] = part[:before]
        self._data[: len(part) - before] = part[before:]

    def _get(self, position: int, size: int) -> bytes:
        start = position % _CAPACITY
        return bytes(self._data[start : start + size]) + bytes(self._data[: max(0, start + size - _CAPACITY)])


def _padded(size: int) -> int:
    return _HEADER.size + (size + 7) // 8 * 8


def _sleep(address: int, count: int, seconds: float) -> None:
    """Sleep while the word at the address has the low half of this count, until somebody wakes, or a signal."""
    if _FUTEX is None:
        return time.sleep(_PAUSE)
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e9))
    low = ctypes.c_int32(count & 0xFFFFFFFF).value
    _libc.syscall(_FUTEX, address, _WAIT, low, limit, None, 0)


def _wake(address: int) -> None:
    if _FUTEX is not None:
        _libc.syscall(_FUTEX, address, _WAKE, _EVERYONE, None, None, 0)
