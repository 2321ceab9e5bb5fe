"""The client that starts the engine core in a process of its own, and both ends of what the two say to each other.

The front end keeps its event loop smooth while the model computes, and survives the engine. Commands and events are
msgspec structs over two ZeroMQ sockets (`ipc://`, in a directory that only this user may enter). The child,
`quire.entrypoints.engine`, reads its options from standard input, and that pipe's end is how it learns that the parent
is gone.
"""

import asyncio
import contextlib
import math
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable

import msgspec
import zmq

from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError, EngineDeadError
from quire.protocol.core import Beat, Command, Dead, Event, Failed, Ready, Stop
from quire.utils.child import how_it_ended, is_stopped, start_child
from quire.utils.logs import logger

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 7.0  # without a beat: the engine has stopped
CLOSE_SECONDS = 2.5  # for the child to end its loop, and to leave by itself
WRITING_SECONDS = 5.0  # besides, for one whose loop has ended: weights and blocks are being written
_LEFT = "left"  # a file in the sockets' directory: the child's loop has ended


class Birth(msgspec.Struct, frozen=True):
    """What the child is told on its standard input, as one line of JSON."""

    args: EngineArgs
    directory: str  # of the sockets
    log_level: str
    rank: int = 0  # among several engines


def _socket(context: zmq.Context, kind: int, directory: str, name: str, *, binds: bool = False) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set_hwm(0)  # nothing is dropped, and nobody blocks; what bounds the queues is the number of requests
    (socket.bind if binds else socket.connect)(f"ipc://{directory}/{name}")
    return socket


class ProcessClient:
    """Starts the child (a `CoreClient`)."""

    def __init__(self, args: EngineArgs, log_level: str, rank: int = 0) -> None:
        """`rank`: the engine's, where there are several."""
        self._process = start_child("quire.entrypoints.engine")
        self.pid = self._process.pid
        try:
            # The child is told of it before it is there: whenever a signal cuts this short, somebody can remove it.
            self._directory = os.path.join(tempfile.gettempdir(), f"quire-{secrets.token_hex(8)}")
            _tell(self._process, Birth(args, self._directory, log_level, rank))
            self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
            os.mkdir(self._directory, 0o700)
            context = zmq.Context.instance()  # never ended: that may hang for ever where a child was killed as it sent
            self._commands = _socket(context, zmq.PUSH, self._directory, "commands", binds=True)
            self._events = _socket(context, zmq.PULL, self._directory, "events", binds=True)
        except (OSError, zmq.ZMQError) as error:
            self._process.kill()
            why, remedy = os.strerror(error.errno or 0), "set TMPDIR to one of a short path that can be written to"
            raise ConfigError(f"no folder of sockets for the engine can be made: {why}; {remedy}.") from None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Event).decode
        self._closing = self._ready = False
        self._turn = threading.Lock()
        self._listening: asyncio.AbstractEventLoop | None = None
        self._last_beat, self._in_step = time.monotonic(), 0.0

    def wait_ready(self) -> Ready:
        event: Event = Beat(0.0)
        num_stopped = 0  # looks in succession: after a Ctrl-Z of all, this process may be the first to go on
        while isinstance(event, Beat):  # which another socket sends, so it may overtake
            while not self._events.poll(200):
                if (code := self._process.poll()) is not None and not self._events.poll(0):
                    raise EngineDeadError(f"the engine's process ended while loading ({how_it_ended(code)}).")
                num_stopped = num_stopped + 1 if code is None and is_stopped(self._process) else 0
                if num_stopped > 5 * SILENCE_SECONDS:
                    raise EngineDeadError("the engine's process was stopped while loading (SIGSTOP), for good.")
            event = self._decode(self._events.recv())
        if isinstance(event, Failed):
            raise event.fault.error()
        assert isinstance(event, Ready), "the first event is Ready or Failed"
        self._ready = True
        return event

    def attach(self, on_event: Callable[[Event], None]) -> None:
        loop = asyncio.get_running_loop()

        def receive() -> None:
            """Take all there is: ZeroMQ's descriptor only tells of the passage from empty to not empty."""
            with contextlib.suppress(zmq.Again):
                while not self._closing:
                    event = self._decode(self._events.recv(zmq.NOBLOCK))
                    if isinstance(event, Beat):
                        self._last_beat, self._in_step = time.monotonic(), event.seconds_in_step
                    else:
                        on_event(event)

        self._last_beat = time.monotonic()  # loading took its time, and nobody has read the beats
        self._listening = loop
        loop.add_reader(self._events.fileno(), receive)
        loop.call_soon(receive)

        def watch() -> None:
            code = self._process.wait()
            if not self._closing:
                dead = Dead(f"the engine's process ended unexpectedly ({how_it_ended(code)})")
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(on_event, dead)

        threading.Thread(target=watch, name="quire-engine-watch", daemon=True).start()

    def send(self, command: Command) -> None:
        with contextlib.suppress(zmq.Again):  # nobody listens: the child is gone, as its watch is about to tell
            self._commands.send(self._encode(command), zmq.NOBLOCK)

    def seconds_stuck(self) -> float:
        silence = time.monotonic() - self._last_beat
        # At least so long, as the next beat is not due before that.
        return math.inf if silence > SILENCE_SECONDS else max(0.0, self._in_step + silence - BEAT_SECONDS)

    def kill(self) -> None:
        """End the child at once; `close` is still to be called."""
        self._process.kill()

    def close(self) -> None:
        with self._turn:  # a second caller waits until the first has ended the child
            if not self._closing:
                self._closing = True
                self._end()

    def _end(self) -> None:
        if self._listening is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._listening.call_soon_threadsafe(self._listening.remove_reader, self._events.fileno())
        self.send(Stop())
        if not self._ready:
            self._process.kill()  # it would not listen while it loads
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if not self._ends_within(CLOSE_SECONDS) and os.path.exists(os.path.join(self._directory, _LEFT)):
            logger.info("the engine still writes to the disk; it has %g s for that", WRITING_SECONDS)
            self._ends_within(WRITING_SECONDS)
        self._process.kill()
        self._process.wait()
        for socket in (self._commands, self._events):
            socket.close(linger=0)
        self._remove()

    def _ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


def _tell(process: subprocess.Popen[bytes], birth: Birth) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is gone already: the caller sees its exit
        process.stdin.write(msgspec.json.encode(birth) + b"\n")
        process.stdin.flush()


class ChildEnd:
    """The child's end of the sockets."""

    def __init__(self, directory: str) -> None:
        self._directory, self._context = directory, zmq.Context()
        self._commands = _socket(self._context, zmq.PULL, directory, "commands")
        self._events = _socket(self._context, zmq.PUSH, directory, "events")
        self._encode, self._decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Command).decode

    def receive(self, wait: bool) -> list[Command]:
        """The commands that have come; if asked to, waits a second for the first."""
        received: list[Command] = []
        while self._commands.poll(1000 if wait and not received else 0):
            received.append(self._decode(self._commands.recv()))
        return received

    def send(self, event: Event) -> None:
        """Tell the parent."""
        self._events.send(self._encode(event))

    def beat(self, step_start: Callable[[], float | None]) -> None:
        """Tell the parent every second how long the running step has taken; a socket belongs to one thread."""
        with contextlib.suppress(zmq.ZMQError), _socket(self._context, zmq.PUSH, self._directory, "events") as socket:
            while True:
                start = step_start()
                socket.send(msgspec.msgpack.encode(Beat(0.0 if start is None else time.monotonic() - start)))
                time.sleep(BEAT_SECONDS)

    def close(self) -> None:
        """Say nothing more but beats, and that the loop has ended; what was said is still sent."""
        self._events.close(linger=1000)
        with contextlib.suppress(OSError), open(os.path.join(self._directory, _LEFT), "xb"):
            pass  # which the parent sees, unless it is gone

    def destroy(self) -> None:
        """End all of it, once what was said is sent."""
        self._context.destroy(linger=1000)
