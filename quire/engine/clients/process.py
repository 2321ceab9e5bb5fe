"""The engine core in a process of its own, and the client that starts it.

The front end keeps its event loop smooth while the model computes, and survives the engine. Commands and events are
msgspec structs over two ZeroMQ sockets (`ipc://`, in a directory that only this user may enter). The child reads its
options from standard input, and that pipe's end is how it learns that the parent is gone. Run as a module, this file
is the child.
"""

import asyncio
import contextlib
import gc
import logging
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable

import msgspec
import zmq

from quire.config.engine_args import EngineArgs
from quire.errors import EngineDeadError, QuireError
from quire.executor.binding import cpus_of_ranks
from quire.protocol.core import Beat, Command, Dead, Event, Failed, Fault, Ready, Stop
from quire.utils.child import how_it_ended, is_stopped, start_child
from quire.utils.logs import configure_logging

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 7.0  # without a beat: the engine has stopped
CLOSE_SECONDS = 2.5  # for the child to leave by itself
_EXIT_ORPHANED = 3

logger = logging.getLogger("quire")


class Birth(msgspec.Struct, frozen=True):
    """What the child is told on its standard input, as one line of JSON."""

    args: EngineArgs
    directory: str  # of the sockets
    log_level: str
    rank: int = 0  # among several engines


def _address(directory: str, name: str) -> str:
    return f"ipc://{directory}/{name}"


class ProcessClient:
    """Starts the child (a `CoreClient`)."""

    def __init__(self, args: EngineArgs, log_level: str, rank: int = 0) -> None:
        """`rank`: the engine's, where there are several."""
        self._process = start_child("quire.engine.clients.process")
        self.pid = self._process.pid
        # The child is told of it before it is there: whenever a signal cuts this short, somebody can remove it.
        self._directory = os.path.join(tempfile.gettempdir(), f"quire-{secrets.token_hex(8)}")
        _tell(self._process, Birth(args, self._directory, log_level, rank))
        self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        os.mkdir(self._directory, 0o700)
        self._context = zmq.Context()
        self._commands = self._socket(zmq.PUSH, "commands")
        self._events = self._socket(zmq.PULL, "events")
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Event).decode
        self._closing = False
        self._turn = threading.Lock()
        self._listening: asyncio.AbstractEventLoop | None = None
        self._last_beat, self._in_step = time.monotonic(), 0.0
        self._ready = False

    def wait_ready(self) -> Ready:
        event: Event = Beat(0.0)
        num_stopped = 0  # looks in succession: after a Ctrl-Z of all, this process may be the first to go on
        while isinstance(event, Beat):  # which another socket sends, so it may overtake
            while not self._events.poll(200):
                if (code := self._process.poll()) is not None and not self._events.poll(0):
                    raise EngineDeadError(f"the engine's process ended while loading ({how_it_ended(code)}).")
                num_stopped = num_stopped + 1 if code is None and is_stopped(self._process) else 0
                if num_stopped > 5 * SILENCE_SECONDS:
                    what = "the engine's process was stopped while loading (SIGSTOP)"
                    raise EngineDeadError(f"{what}, and did not go on.")
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
        if silence > SILENCE_SECONDS:
            return math.inf
        return max(0.0, self._in_step + silence - BEAT_SECONDS)  # at least: the next beat is not due before that

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
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._context.destroy(linger=0)
        self._remove()

    def _socket(self, kind: int, name: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # nothing is dropped, and nobody blocks; what bounds the queues is the number of requests
        socket.bind(_address(self._directory, name))
        return socket


def _tell(process: subprocess.Popen[bytes], birth: Birth) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is gone already: the caller sees its exit
        process.stdin.write(msgspec.json.encode(birth) + b"\n")
        process.stdin.flush()


def main() -> int:
    """The child: load the model, serve, and leave when told to or when the parent is gone."""
    sys.setswitchinterval(1e-3)  # seconds: of a thread that computes beside the loop, as one that loads an adapter
    # The front end, whose work is short, goes first: requests that trickle in cost the engine whole steps.
    os.nice(5)
    # A terminal's Ctrl-C and a service manager's SIGTERM go to the whole group: the parent decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if not (line := sys.stdin.buffer.readline()).endswith(b"\n"):
        return _EXIT_ORPHANED
    birth = msgspec.json.decode(line, type=Birth)
    configure_logging(birth.log_level, f"engine {birth.rank}: " if birth.args.data_parallel_size > 1 else "")
    _take_share(birth.args, birth.rank)
    leaving = threading.Event()
    threading.Thread(target=_watch_parent, args=(birth.directory, leaving), daemon=True).start()
    context = zmq.Context()
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Command).decode
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, name in ((commands, "commands"), (events, "events")):
        socket.set_hwm(0)
        socket.connect(_address(birth.directory, name))

    def receive(wait: bool) -> list[Command]:
        received: list[Command] = []
        while commands.poll(1000 if wait and not received else 0):
            received.append(decode(commands.recv()))
        return received

    def send(event: Event) -> None:
        events.send(encode(event))

    try:
        gc.disable()  # of what is made from here on nothing is garbage
        from quire.engine.build import build_core  # torch comes in here: the watch above must not wait for it
        from quire.engine.loop import CoreLoop

        core = build_core(birth.args.resolve(), show_progress=sys.stderr.isatty(), rank=birth.rank)
        loop = CoreLoop(core, receive, send)
    except QuireError as error:
        send(Failed(Fault.of(error)))
        context.destroy(linger=1000)
        return 1
    gc.freeze()  # the model's objects are here to stay: collections need not look at them again
    gc.enable()
    beat = threading.Thread(target=_beat, args=(context, birth.directory, lambda: loop.step_start), daemon=True)
    beat.start()
    send(loop.ready())
    alive = loop.run()
    leaving.set()
    events.close(linger=1000)
    if alive:
        loop.core.stop()
    _let_finish(CLOSE_SECONDS - 1.0)
    return 0 if alive else 1


def _take_share(args: EngineArgs, rank: int) -> None:
    """Of several engines, each takes its part of the cores: its number of threads, and those very cores by default."""
    size = args.data_parallel_size
    if size == 1 or args.distributed_executor_backend == "ray":
        return
    share = cpus_of_ranks("auto", size)[rank]
    if share and args.cpu_bind == "auto" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(share))))


def _let_finish(seconds: float) -> None:
    """Wait that long for the threads that the interpreter would wait for: packed weights are being written."""
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def _watch_parent(directory: str, leaving: threading.Event) -> None:
    """Leave when standard input ends: the parent is gone, or closing and about to wait."""
    while sys.stdin.buffer.read(4096):
        pass
    if not leaving.wait(CLOSE_SECONDS - 0.5):
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(_EXIT_ORPHANED)


def _beat(context: zmq.Context, directory: str, step_start: Callable[[], float | None]) -> None:
    """Tell the parent every second how long the running step has taken; a socket belongs to one thread."""
    with contextlib.suppress(zmq.ZMQError), context.socket(zmq.PUSH) as socket:
        socket.set_hwm(0)
        socket.connect(_address(directory, "events"))
        while True:
            start = step_start()
            socket.send(msgspec.msgpack.encode(Beat(0.0 if start is None else time.monotonic() - start)))
            time.sleep(BEAT_SECONDS)


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        logger.critical("the engine's process failed", exc_info=True)
        code = 1
    logging.shutdown()
    os._exit(code)  # at once: nothing is left to save, and threads of libraries may linger
