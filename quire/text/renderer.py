"""Has chat templates rendered by a process that the system limits, and that can be killed (`render_child`).

A tokenizer has a renderer for offline use, and the asynchronous front end several, so that nobody waits for a stranger.
It knows nothing of templates and messages: a job goes in as bytes, and a text comes out.
"""

import contextlib
import os
import select
import signal
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from quire.errors import InvalidRequestError, RequestFailedError
from quire.utils.child import start_child

FRAME = struct.Struct("<Q")  # bytes of msgpack that follow, in both directions
MAX_CHARS = 1 << 24  # of a prompt
_DEADLINE = 30.0  # seconds on the clock, for a process that gets no processor time
_MAX_ANSWER = 4 * MAX_CHARS + 1024  # bytes


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A conversation to render: see `ChatTemplate.render`."""

    template: str
    special_tokens: dict[str, str]
    messages: Any
    options: dict[str, Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The prompt, or what is wrong with the template or the conversation."""

    text: str | None = None
    error: str = ""
    param: str | None = None


class Renderer:
    """One process, started when first needed and kept; calls from several threads take turns."""

    def __init__(self, seconds: int = 5, megabytes: int = 1024) -> None:
        """`seconds` of processor time for a job, and `megabytes` of memory for the process."""
        self._limits = seconds, megabytes
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it, which another one that is forked off is not
        self._turn = threading.Lock()
        self._decode = msgspec.msgpack.Decoder(Answer).decode
        self._drop: Callable[[], object] = lambda: None  # end the process

    def render(self, job: bytes) -> str:
        """The prompt of a `Job`, which is given as msgpack.

        Raises:
            InvalidRequestError: what the template or the messages are refused for; too much time or memory taken.
            RequestFailedError: the process can't be started, or fails by itself.
        """
        with self._turn:
            # A process that has grown leaves after an answer: the job that it no longer took is for the next.
            answer = self._ask(job) or self._ask(job)
        if answer is None:
            raise RequestFailedError("the process that renders chat templates ended without an answer.")
        if answer.text is None:
            raise InvalidRequestError(answer.error, answer.param)
        return answer.text

    def close(self) -> None:
        """End the process, at once; a later job starts another."""
        if self._child is not None and self._owner == os.getpid():
            self._child.kill()  # a thread that waits for its answer hears of it, and gives up its turn
        with self._turn:
            self._drop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._owner == os.getpid() and self._child.poll() is None:
            return self._child
        self._drop()
        try:
            child = start_child("quire.text.render_child", *map(str, self._limits), answers=True, keys=False)
        except OSError as error:
            raise RequestFailedError(
                f"chat templates are rendered in a process of their own, which can't be started ({error.strerror}); "
                "let this user have more processes or memory, or pass a prompt that is rendered already."
            ) from None
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._child, self._owner = child, os.getpid()
        self._drop = weakref.finalize(self, _end, child, self._owner)
        return child

    def _ask(self, job: bytes) -> Answer | None:
        """The child's answer; None, and no child, where it has left in good order."""
        child = self._running()
        try:
            data = _exchange(child, FRAME.pack(len(job)) + job)
        except BaseException:  # an interrupt leaves half a message in the pipe; so does a job that takes too long
            self._drop()
            raise
        if data is not None:
            return self._decode(data)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_DEADLINE)
        self._drop()
        code = child.returncode
        if code == 0:
            return None
        if code == -signal.SIGXCPU:
            raise _stopped(f"it ran for more than {self._limits[0]} s")
        if code < 0:
            raise _stopped(f"its process was ended by {signal.Signals(-code).name}; too much memory, perhaps")
        raise RequestFailedError(f"the process that renders chat templates failed (exit code {code}).")


class RenderLane(ThreadPoolExecutor):
    """Threads, each with a process that renders for it; one that is warm comes first."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__(width, f"quire-{name}")
        self._renderers = [Renderer() for _ in range(width)]
        self._idle = [*self._renderers]  # as many as there are threads: one that works finds one

    def render(self, job: bytes) -> str:
        """As `Renderer.render`, in one of these threads."""
        renderer = self._idle.pop()
        try:
            return renderer.render(job)
        finally:
            self._idle.append(renderer)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads, and the processes."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        for renderer in self._renderers:
            renderer.close()


def _stopped(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the chat template was stopped: {reason}.", "chat_template")


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        with child:  # closes its pipes, and waits
            child.kill()


def _exchange(child: subprocess.Popen[bytes], data: bytes) -> bytes | None:
    """Send a message and return the one that answers it; None where the other end closes first.

    Raises:
        InvalidRequestError: neither came in time, or the answer is larger than any may be.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    to_child, from_child = child.stdin.fileno(), child.stdout.fileno()
    poller = select.poll()  # knows descriptors of any number, which select() does not
    poller.register(to_child, select.POLLOUT)
    poller.register(from_child, select.POLLIN)
    rest, received, wanted = memoryview(data), bytearray(), FRAME.size
    end = time.monotonic() + _DEADLINE
    while len(received) < wanted:
        ready = poller.poll(max(0.0, end - time.monotonic()) * 1000)
        if not ready:
            raise _stopped(f"it took more than {_DEADLINE:g} s")
        for descriptor, _ in ready:
            if descriptor == to_child:
                try:
                    rest = rest[os.write(to_child, rest) :]
                except BrokenPipeError:
                    rest = rest[:0]  # what it says last is on its way
                if not rest:
                    poller.unregister(to_child)
            elif piece := os.read(from_child, 1 << 20):
                received += piece
            else:
                return None
        if wanted == FRAME.size <= len(received):
            wanted += FRAME.unpack_from(received)[0]
            if wanted > _MAX_ANSWER:
                raise _stopped("it wrote too much")
    return bytes(received[FRAME.size :])
