"""Messages through shared memory: whole, in order, to every reader, however large, and after interrupts."""

import mmap
import random
import threading
from typing import Any

import pytest

from quire.executor import transport
from quire.executor.transport import PIPE_BYTES, Pipe
from quire.utils.host_memory import make_memory


def pipes(num_readers: int) -> list[Pipe]:
    """A writer, and the readers."""
    memory = mmap.mmap(make_memory(PIPE_BYTES), 0)
    return [Pipe(memory, 0, num_readers, 0), *(Pipe(memory, 0, num_readers, i) for i in range(num_readers))]


def test_every_reader_gets_every_message() -> None:
    rng = random.Random(0)
    sizes = [0, 1, 7, 8, 9, 3000, transport._MOST, transport._MOST + 1, 3 * transport._CAPACITY + 5]
    sent = [(kind, rng.randbytes(size)) for kind, size in enumerate(rng.choices(sizes, k=40))]
    writer, *readers = pipes(3)
    got: list[list[Any]] = [[] for _ in readers]

    def read(reader: Pipe, mine: list[Any]) -> None:
        while len(mine) < len(sent):
            if (message := reader.read(10.0)) is None:
                return
            mine.append((message[0], bytes(message[1])))

    threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, got, strict=True)]
    for thread in threads:
        thread.start()
    for kind, body in sent:
        writer.write(kind, body)
    for thread in threads:
        thread.join()
    assert got == [sent] * 3


def test_nothing_comes_where_nothing_was_sent() -> None:
    _, reader = pipes(1)
    assert reader.read(0.0) is None
    assert reader.read(0.01) is None


def test_a_writer_that_waits_looks_whether_anybody_reads() -> None:
    writer, _ = pipes(1)

    def nobody() -> None:
        raise RuntimeError("nobody reads")

    with pytest.raises(RuntimeError, match="nobody reads"):
        writer.write(1, bytes(2 * transport._CAPACITY), nobody)


def test_what_an_interrupt_has_cut_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of two parts of which one is there, one that is not counted, then the next message."""
    writer, reader = pipes(1)
    put = Pipe._put

    def interrupt_at(call: int) -> None:
        calls = iter(range(100))

        def interrupted(self: Pipe, *given: Any) -> None:
            if next(calls) == call:
                raise KeyboardInterrupt
            put(self, *given)

        monkeypatch.setattr(Pipe, "_put", interrupted)

    for call, size in ((2, transport._MOST + 8), (1, 50)):
        interrupt_at(call)
        with pytest.raises(KeyboardInterrupt):
            writer.write(1, b"x" * size)
    monkeypatch.setattr(Pipe, "_put", put)
    writer.write(2, b"whole")
    assert reader.read(1.0) == (2, b"whole")


def test_without_a_kernel_to_sleep_in_messages_come_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_FUTEX", None)
    writer, reader = pipes(1)
    assert reader.read(0.002) is None
    threading.Timer(0.01, writer.write, (7, b"late")).start()
    assert reader.read(10.0) == (7, b"late")
