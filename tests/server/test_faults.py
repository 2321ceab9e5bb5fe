"""What the server does when something breaks or is killed: no silence, no orphan, and a way on where there is one.

Each test breaks a server of its own, or leaves the shared one as it was. Processes are found in /proc. Faults inside
the engine are put there by a `sitecustomize` module, which Python imports at the start of the engine's process. A jump
of the machine's clock takes privileges, so the wall clock alone is made to jump, inside the processes.
"""

import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client import Address, Connection, Footprint, ask, engine_state, error_at_the_end, events, http, run, until_idle
from serving import START_SECONDS, RunningServer, command_line, live_processes

import quire
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

Starter = Callable[..., RunningServer]
NUM_STREAMS = 6
GONE_SECONDS = 10.0  # in which children leave, and those who wait are told


def long_request(**fields: Any) -> dict[str, Any]:
    """Some seconds of work."""
    return {"prompt": [5] * 4, "max_tokens": 508, "ignore_eos": True, "n": 16, "stream": True, **fields}


class Stream:
    """A streamed answer, of which the first chunk has come."""

    def __init__(self, connection: Connection, chunks: Any, first: bytes) -> None:
        self.connection, self._chunks, self._first = connection, chunks, first

    @classmethod
    async def begin(cls, address: Address, fields: dict[str, Any]) -> "Stream":
        connection = await Connection.open(address)
        connection.send("POST", "/v1/completions", fields)
        status, headers = await connection.head()
        assert status == 200
        chunks = connection.chunks(headers)
        return cls(connection, chunks, await anext(chunks))

    async def rest(self) -> bytes:
        """The body, to its end."""
        body = self._first + b"".join([chunk async for chunk in self._chunks])
        self.connection.close()
        return body


async def begin_all(server: RunningServer, count: int = NUM_STREAMS, **fields: Any) -> list[Stream]:
    return await asyncio.gather(*[Stream.begin(server.port, long_request(**fields)) for _ in range(count)])


def engine_of(server: RunningServer) -> int:
    """The process id of its engine."""
    for pid in server.processes():
        if b"entrypoints.engine" in command_line(pid):
            return pid
    raise AssertionError("there is no engine process")


def assert_gone(server: RunningServer, codes: tuple[int, ...] = (0,), seconds: float = GONE_SECONDS) -> None:
    """It leaves in time, with one of these codes, and so do all of its processes."""
    wait_until(lambda: server.process.poll() is not None, seconds, f"the server still runs:\n{server.log()}")
    wait_until(lambda: not server.processes(), seconds, "the server left processes behind")
    assert server.process.returncode in codes, server.log()


@pytest.fixture
def sockets(tmp_path: Path) -> dict[str, str]:
    """An environment in which the directory of the engine's sockets is made in a place of its own."""
    (tmp_path / "t").mkdir()
    return {"TMPDIR": str(tmp_path / "t")}


def assert_empty(sockets: dict[str, str]) -> None:
    left = sockets["TMPDIR"]
    wait_until(lambda: not os.listdir(left), 10.0, f"temporary files are left: {[*os.walk(left)]}")


# Signals.


SIGNALS = [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_loading(tmp_path: Path, sockets: dict[str, str], number: int) -> None:
    """At whatever moment it comes, nothing is left, and the log has no stack trace."""
    for delay in (0.0, 0.2, 0.7):
        log = tmp_path / f"log{delay}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "quire", "serve", "demo", "--host", "127.0.0.1", "--port", "0"],
                **{"stdout": output, "stderr": output, "env": os.environ | sockets, "start_new_session": True},
            )
        try:
            wait_until(lambda log=log: b"loading" in log.read_bytes(), 60)
            time.sleep(delay)
            process.send_signal(number)
            assert process.wait(GONE_SECONDS) == 0, log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()
            assert_empty(sockets)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_while_idle(start_server: Starter, sockets: dict[str, str], number: int) -> None:
    """It leaves at once, though clients keep connections open."""
    server = start_server("--trust-request-chat-template", env=sockets)
    server.chat("Hello", chat_template="{{ messages[0].content }}", max_tokens=1)

    async def scenario() -> float:
        kept = await Connection.open(server.port)
        kept.send("GET", "/health")
        assert (await kept.answer()).status == 200
        viewer = await Connection.open(server.port)
        viewer.send("GET", "/live")
        _, headers = await viewer.head()
        start = time.monotonic()
        server.signal(number)
        body = b"".join([chunk async for chunk in viewer.chunks(headers)])
        assert b"event: ended" in body
        assert await kept.reader.read() == b""
        return start

    start = run(scenario(), 20)
    assert_gone(server)
    print(f"\n  {time.monotonic() - start:.2f} s")
    assert "Traceback" not in server.log()
    assert_empty(sockets)


@pytest.mark.parametrize("engine", ["process", "thread"])
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_cuts_streams_with_an_error(
    start_server: Starter, sockets: dict[str, str], engine: str, number: int
) -> None:
    """Without a shutdown timeout, running requests end at once, and are told so."""
    server = start_server("--engine", engine, env=sockets)

    async def scenario() -> float:
        whole = asyncio.create_task(ask(server.port, "POST", "/v1/completions", long_request(stream=False)))
        streams = await begin_all(server)
        start = time.monotonic()
        server.signal(number)
        for stream in streams:
            assert error_at_the_end(await stream.rest())["type"] == "server_error"
        answer = await whole
        assert answer.status >= 500
        assert answer.json()["error"]["message"]
        return start

    start = run(scenario(), 30)
    assert_gone(server)
    print(f"\n  {time.monotonic() - start:.2f} s")
    assert "Traceback" not in server.log()
    assert_empty(sockets)


async def refused(port: int) -> None:
    """Return once nobody listens there any more."""
    with contextlib.suppress(ConnectionRefusedError):
        while True:
            (await Connection.open(port)).close()
            await asyncio.sleep(0.02)


def test_sigterm_drains(start_server: Starter) -> None:
    """With a shutdown timeout, running requests end as if nothing were, and nobody new is let in."""
    server = start_server("--shutdown-timeout", "60")

    async def scenario() -> None:
        streams = await begin_all(server, n=4, max_tokens=200, stream_options={"include_usage": True})
        server.signal(signal.SIGTERM)
        await asyncio.wait_for(refused(server.port), 20)
        for stream in streams:
            *_, last, done = events(await stream.rest())
            assert done == "[DONE]"
            assert last["usage"]["completion_tokens"] == 4 * 200

    run(scenario(), 60)
    assert_gone(server)


def test_shutdown_timeout_ends(start_server: Starter) -> None:
    """What is not done in time is cut, with an error."""
    server = start_server("--shutdown-timeout", "0.5")

    async def scenario() -> None:
        idler = await Connection.open(server.port, receive_buffer=2048)  # whose answer has no place to go
        idler.send("POST", "/v1/completions", long_request(logprobs=20))
        streams = await begin_all(server)
        server.signal(signal.SIGTERM)
        for stream in streams:
            assert error_at_the_end(await stream.rest())["message"]

    run(scenario(), 30)
    assert_gone(server)


def test_second_sigterm_hurries(start_server: Starter) -> None:
    server = start_server("--shutdown-timeout", "600")

    async def scenario() -> None:
        streams = await begin_all(server)
        server.signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert server.process.poll() is None
        assert len(server.processes()) >= 2
        server.signal(signal.SIGTERM)
        for stream in streams:
            assert error_at_the_end(await stream.rest())["message"]

    run(scenario(), 30)
    assert_gone(server)


def test_stop_and_go(start_server: Starter) -> None:
    """A server that was stopped for longer than its engine may be silent does not take the engine for dead."""
    server = start_server("--step-timeout", "1")

    async def scenario() -> None:
        streams = await begin_all(server, count=1, n=2)
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(2)
        server.signal(signal.SIGCONT)
        assert events(await streams[0].rest())[-2]["choices"][0]["finish_reason"] == "length"

    run(scenario(), 60)
    assert server.golden()[0]


# The engine dies.


async def everyone_is_told(server: RunningServer, break_it: Callable[[], object], patience: float = 0.0) -> float:
    """Break the engine under load: all who wait get a typed error. Returns the longest wait."""
    whole = asyncio.create_task(ask(server.port, "POST", "/v1/completions", long_request(stream=False)))
    streams = await begin_all(server)
    start = time.monotonic()
    break_it()
    async with asyncio.timeout(patience + GONE_SECONDS):
        for stream in streams:
            error = error_at_the_end(await stream.rest())
            assert error["type"] == "server_error"
            assert "engine" in error["message"]
        answer = await whole
    assert answer.status == 500
    assert answer.json()["error"]["type"] == "server_error"
    seconds = time.monotonic() - start
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # or it has left already
        assert (await ask(server.port, "GET", "/health")).status == 503
        assert (await ask(server.port, "POST", "/v1/completions", {"prompt": "a"})).status == 500
    return seconds


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.nightly)])
def test_engine_is_killed(start_server: Starter, sockets: dict[str, str], number: int) -> None:
    server = start_server(env=sockets)
    engine = engine_of(server)
    seconds = run(everyone_is_told(server, lambda: os.kill(engine, number)), 60)
    print(f"\n  told in {seconds:.2f} s")
    assert_gone(server, codes=(1,))
    assert signal.Signals(number).name in server.log()
    assert "Traceback" not in server.log()
    assert_empty(sockets)


def test_engine_is_killed_while_idle(start_server: Starter) -> None:
    server = start_server()
    os.kill(engine_of(server), signal.SIGKILL)
    assert_gone(server, codes=(1,))
    assert "error: the engine is dead" in server.log()


def test_engine_hangs(start_server: Starter, sockets: dict[str, str]) -> None:
    """Stopped for good: the server gives it --step-timeout, and kills it then."""
    server = start_server("--step-timeout", "1", env=sockets)
    engine = engine_of(server)
    seconds = run(everyone_is_told(server, lambda: os.kill(engine, signal.SIGSTOP), patience=1), 60)
    print(f"\n  told in {seconds:.2f} s")
    assert_gone(server, codes=(1,), seconds=20)
    assert_empty(sockets)


SABOTAGE = """
import os, signal, sys, time
if sys.orig_argv[-1] in ("quire.entrypoints.engine", "thread"):
    from quire.engine.core import EngineCore
    step, count = EngineCore.step, 0
    def no_memory(plan):
        raise MemoryError
    def broken(core):
        global count
        count += 1
        if count == 20:
            FAULT
        return step(core)
    EngineCore.step = broken
"""


def sabotaged(tmp_path: Path, text: str) -> dict[str, str]:
    """An environment in which each Python process runs `text` first."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sitecustomize.py").write_text(textwrap.dedent(text))
    return {"PYTHONPATH": str(tmp_path / "s")}


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        pytest.param("process", "core.executor.submit = lambda plan: 1 / 0", marks=pytest.mark.nightly),
        ("process", "core.executor.submit = no_memory"),
        pytest.param("process", "core.scheduler.update = None", marks=pytest.mark.nightly),
        pytest.param("process", "os._exit(0)", marks=pytest.mark.nightly),  # as test_engine_is_killed
        ("process", "time.sleep(1000)"),
        pytest.param("thread", "core.executor.submit = no_memory", marks=pytest.mark.nightly),
        ("thread", "core.scheduler.update = None"),
        pytest.param("thread", "time.sleep(1000)", marks=pytest.mark.nightly),
    ],
)
def test_step_fails(start_server: Starter, tmp_path: Path, engine: str, fault: str) -> None:
    """A step raises, runs out of memory, breaks the scheduler, ends the process without an error, or never returns."""
    env = sabotaged(tmp_path, SABOTAGE.replace("FAULT", fault))
    server = start_server("--step-timeout", "1", "--engine", engine, env=env)
    run(everyone_is_told(server, lambda: None, patience=1), 60)
    assert_gone(server, codes=(1,), seconds=20)
    assert "error: the engine is dead" in server.log()


def test_one_request_fails_alone(start_server: Starter, tmp_path: Path) -> None:
    """What the engine can't compute for one request, or can't even take, is that request's error."""
    text = """
    import sys
    if sys.orig_argv[-1] == "quire.entrypoints.engine":
        from quire.scheduler.scheduler import Scheduler
        add = Scheduler.add
        def broken(self, request, now):
            if len(request.prompt_token_ids) == 7:
                raise ZeroDivisionError
            return add(self, request, now)
        Scheduler.add = broken
    """
    server = start_server(env=sabotaged(tmp_path, text))
    golden = server.golden()

    async def scenario() -> None:
        streams = await begin_all(server, count=2, n=2, max_tokens=200)
        refused = await ask(server.port, "POST", "/v1/completions", {"prompt": [5] * 7})
        assert refused.status == 500
        assert refused.json()["error"]["type"] == "server_error"
        assert "ZeroDivision" not in refused.body.decode()
        for stream in streams:
            assert events(await stream.rest())[-1] == "[DONE]"
        await until_idle(server.port)

    run(scenario(), 60)
    assert server.golden() == golden
    server.kill()  # the log has a stack trace, as it ought to


def test_wall_clock_jumps(start_server: Starter, tmp_path: Path) -> None:
    """Back and forth by days at every look: no request and no watchdog minds."""
    text = "import random, time; now = time.time; time.time = lambda: now() + random.uniform(-1e6, 1e6)"
    server = start_server("--step-timeout", "1", env=sabotaged(tmp_path, text))
    golden = server.golden()
    time.sleep(1.5)
    assert server.golden() == golden
    assert server.metrics()["vllm:e2e_request_latency_seconds_sum"] < 60


# The server dies.


@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_server_is_killed(start_server: Starter, sockets: dict[str, str], busy: bool) -> None:
    """Its engine leaves by itself, and takes the sockets along; so do the processes that render templates."""
    server = start_server("--trust-request-chat-template", env=sockets)
    server.chat("Hello", chat_template="{{ messages[0].content }}", max_tokens=1)
    # One renders the model's template, and one strangers'; the one that learns how calls are written has left.
    wait_until(lambda: len(server.processes()) == 4, 20)

    async def scenario() -> None:
        if busy:
            await begin_all(server)
        server.signal(signal.SIGKILL)

    run(scenario(), 30)
    assert_gone(server, codes=(-signal.SIGKILL,))
    assert_empty(sockets)


def test_server_is_killed_while_loading(tmp_path: Path, sockets: dict[str, str]) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", "demo", "--host", "127.0.0.1", "--port", "0"],
            **{"stdout": output, "stderr": output, "env": os.environ | sockets, "start_new_session": True},
        )
    wait_until(lambda: b"loading" in log.read_bytes(), 60)
    # A directory: Python itself tries the place with a file, of which a kill would leave the name.
    wait_until(lambda: any(one.is_dir() for one in Path(sockets["TMPDIR"]).iterdir()), 10)
    process.kill()
    process.wait()
    wait_until(lambda: not list(live_processes(process.pid)), GONE_SECONDS, "the engine outlives the server")
    assert_empty(sockets)


_KILLED_WITH_A_NEW_DIRECTORY = """
import os, signal
from quire.config.engine_args import EngineArgs
from quire.engine.clients.process import ProcessClient

def mkdir(*given, make=os.mkdir):
    make(*given)
    os.kill(os.getpid(), signal.SIGKILL)

os.mkdir = mkdir
ProcessClient(EngineArgs("demo"), "info")
"""


def test_nothing_is_left_of_a_client_that_is_killed_as_it_makes_its_directory(sockets: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED_WITH_A_NEW_DIRECTORY], env=os.environ | sockets, start_new_session=True
    )
    assert process.wait(60) == -signal.SIGKILL
    wait_until(lambda: not list(live_processes(process.pid)), GONE_SECONDS, "the engine outlives its client")
    assert_empty(sockets)


# Starts that fail: one clear line, a code, and no stack trace.


def failed_start(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and log of `quire serve` that does not come up."""
    command = [sys.executable, "-m", "quire", "serve", *arguments, "--host", "127.0.0.1"]
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, timeout=START_SECONDS)
    log = (done.stdout + done.stderr).decode()
    *_, last = log.splitlines()
    assert last.startswith("error: "), log
    assert "Traceback" not in log, log
    return done.returncode, log


@pytest.mark.parametrize(
    "flags",
    [(), ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2"), ("--data-parallel-size", "2")],
    ids=["one", "tensor", "pipeline", "data"],
)
def test_nothing_listens_but_the_port(start_server: Starter, flags: tuple[str, ...]) -> None:
    """Ranks, engines and helpers of one machine meet where no other machine can reach them."""
    server = start_server(*flags)
    server.golden()
    assert _listening(server.processes()) == {("127.0.0.1", server.port)}


def _listening(processes: list[int]) -> set[tuple[str, int]]:
    """Addresses (those of IPv6 in hexadecimal) and ports at which these processes take connections, or datagrams."""
    held = set[str]()
    for path in [path for pid in processes for path in Path(f"/proc/{pid}/fd").iterdir()]:
        with contextlib.suppress(OSError):
            held.add(os.readlink(path))
    found: set[tuple[str, int]] = set()
    for kind, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            _, local, _, is_in, *_, inode = line.split()[:10]
            host, _, port = local.partition(":")
            if is_in == state and f"socket:[{inode}]" in held:
                shown = socket.inet_ntoa(bytes.fromhex(host)[::-1]) if len(host) == 8 else host
                found.add((shown, int(port, 16)))
    return found


def test_port_is_taken(server: RunningServer) -> None:
    """Said before the model is loaded."""
    code, log = failed_start("demo", "--port", str(server.port))
    assert code == 1
    assert log.startswith(f"error: can't listen on 127.0.0.1 port {server.port}: Address already in use.")
    assert len(log.splitlines()) == 1


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _header_changed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + data[8 + size :]


def _first_tensor(header: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in header.items() if name != "__metadata__")


CORRUPTIONS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": _truncated,
    "noise": lambda data: random.Random(0).randbytes(5000),
    "header beyond the end": lambda data: (2**60).to_bytes(8, "little") + data[8:],
    "header is no JSON": lambda data: data[:8] + b"x" * 100 + data[108:],
    "tensor beyond the end": lambda data: _header_changed(
        data, lambda h: _first_tensor(h).update(data_offsets=[0, 2**50])
    ),
    "negative offset": lambda data: _header_changed(data, lambda h: _first_tensor(h).update(data_offsets=[-8, 8])),
    "lying shape": lambda data: _header_changed(data, lambda h: _first_tensor(h).update(shape=[3, 5])),
    "unknown dtype": lambda data: _header_changed(data, lambda h: _first_tensor(h).update(dtype="X7")),
    "missing tensor": lambda data: _header_changed(data, lambda h: h.pop(list(h)[-1])),
}


# Of the file one, and of what it holds; the others each night.
ALWAYS = ("truncated", "missing tensor")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.nightly) for name in CORRUPTIONS]
)
def test_corrupt_weights(tmp_path: Path, name: str) -> None:
    demo = Path(quire.__file__).parent / "demo"
    model = tmp_path / "model"
    shutil.copytree(demo, model, ignore=shutil.ignore_patterns("draft", "*.md"))
    weights = model / "model.safetensors"
    weights.write_bytes(CORRUPTIONS[name](weights.read_bytes()))
    code, log = failed_start(str(model), "--port", "0")
    assert code == 1, log
    assert "model.safetensors" in log or "tensor" in log


BROKEN = [(file, content) for file in ("config.json", "tokenizer.json") for content in (b"{", b"[]", b"", b"\xff\xfe")]


@pytest.mark.parametrize(
    ("file", "content"),
    [pytest.param(*case, marks=() if i in (0, 5) else pytest.mark.nightly) for i, case in enumerate(BROKEN)],
)
def test_corrupt_files_beside_the_weights(tmp_path: Path, file: str, content: bytes) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(quire.__file__).parent / "demo", model, ignore=shutil.ignore_patterns("draft", "*.md"))
    (model / file).write_bytes(content)
    code, log = failed_start(str(model), "--port", "0")
    assert code in (1, 2), log
    assert file in log or "tokenizer" in log


def test_more_memory_than_there_is() -> None:
    code, log = failed_start("demo", "--port", "0", "--num-kv-blocks", "1000000000")
    assert code in (1, 2), log
    assert "num_kv_blocks" in log or "memory" in log


# Full disks.


def test_nothing_can_be_written(tmp_path: Path) -> None:
    """No cache of weights, and a log on a full disk: it serves all the same."""
    port = _free_port()
    command = [sys.executable, "-m", "quire", "serve", "demo", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"XDG_CACHE_HOME": "/dev/full", "TMPDIR": str(tmp_path)}
    environment.pop("PYTHONUNBUFFERED", None)  # what can't be written waits for the end then
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(command, stdout=full, stderr=full, env=environment)
    try:
        wait_until(lambda: _status(port) == 200 or process.poll() is not None, 60)
        answer = run(ask(port, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 5}), 20)
        assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(GONE_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _status(address: Address) -> int | None:
    try:
        return run(ask(address, "GET", "/health"), 5).status
    except (OSError, asyncio.IncompleteReadError):
        return None


# Clients that break.


@pytest.fixture
def unharmed(server: RunningServer) -> Iterator[RunningServer]:
    """The shared server, which is idle and answers as before when the test is over, with no more files open."""
    golden = server.golden()
    server.wait_idle()
    files = Footprint.of(server.processes()).num_files
    yield server
    run(until_idle(server.port), 20)
    assert server.golden() == golden
    server.wait_idle()
    wait_until(lambda: Footprint.of(server.processes()).num_files <= files, 10, "files are left open")


def test_client_leaves_at_any_byte_of_a_stream(unharmed: RunningServer) -> None:
    """By a reset, in good order, or by closing the half that sends."""
    rng, server = random.Random(3), unharmed
    fields = {"prompt": "A long time", "max_tokens": 40, "stream": True, "temperature": 0, "ignore_eos": True}

    async def whole() -> int:
        connection = await Connection.open(server.port)
        connection.send("POST", "/v1/completions", fields, {"Connection": "close"})
        return len(await connection.reader.read())

    async def leave(num_bytes: int, how: str) -> None:
        connection = await Connection.open(server.port)
        connection.send("POST", "/v1/completions", {**fields, "max_tokens": 400, "n": 2, "temperature": 1})
        await connection.reader.readexactly(num_bytes)
        if how == "half":
            connection.writer.write_eof()
            await connection.reader.read()  # the rest or not, but an end
        connection.reset() if how == "reset" else connection.close()

    async def scenario() -> None:
        size = await whole()
        ends = [(rng.randrange(size), how) for how in ("reset", "close", "half") for _ in range(12)]
        await asyncio.gather(*[leave(*end) for end in [(0, "reset"), (1, "close"), *ends]])

    run(scenario(), 60)


def test_client_leaves_at_any_byte_of_a_request(unharmed: RunningServer) -> None:
    rng, server = random.Random(4), unharmed
    data = http("POST", "/v1/completions", long_request())

    async def leave(num_bytes: int, how: str) -> None:
        connection = await Connection.open(server.port)
        connection.writer.write(data[:num_bytes])
        await connection.writer.drain()
        await asyncio.sleep(rng.uniform(0, 0.2))
        if how == "half":
            connection.writer.write_eof()
            await connection.reader.read()
        connection.reset() if how == "reset" else connection.close()

    async def scenario() -> None:
        cuts = [0, 1, len(data) - 1, *(rng.randrange(len(data)) for _ in range(10))]
        await asyncio.gather(*[leave(cut, how) for cut in cuts for how in ("reset", "close", "half")])

    run(scenario(), 60)


def test_idle_connections_are_no_burden(unharmed: RunningServer) -> None:
    """Five hundred clients connect and say nothing; the one that speaks is answered."""

    async def scenario() -> None:
        connections = [await Connection.open(unharmed.port) for _ in range(500)]
        answer = await ask(unharmed.port, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})
        assert answer.status == 200
        for connection in connections:
            connection.close()

    run(scenario(), 30)


def test_files_run_out(start_server: Starter) -> None:
    """More connections than files: those beyond wait, the log tells it once, and all is well when they are gone."""
    server = start_server()
    golden = server.golden()
    limit = Footprint.of([server.process.pid]).num_files + 40
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, limit))

    async def scenario() -> None:
        connections = [await Connection.open(server.port) for _ in range(100)]
        await asyncio.sleep(1.2)  # the loop tries again each second
        for connection in connections:
            connection.close()
        answer = await ask(server.port, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})
        assert answer.status == 200

    run(scenario(), 30)
    assert server.log().count("no more files") == 1
    assert server.golden() == golden


def test_requests_sent_ahead_are_answered_in_order(unharmed: RunningServer) -> None:
    """HTTP pipelining: several requests in one write."""

    async def scenario() -> None:
        connection = await Connection.open(unharmed.port)
        ahead = [http("POST", "/v1/completions", {"prompt": [5], "max_tokens": n}) for n in (20, 3, 1)]
        connection.writer.write(b"".join(ahead) + http("GET", "/health"))
        counts = [(await connection.answer()).json()["usage"]["completion_tokens"] for _ in range(3)]
        assert counts == [20, 3, 1]
        assert (await connection.answer()).status == 200
        connection.close()

    run(scenario(), 30)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", '{"prompt": "\\ud800"}'),
        ("/v1/completions", '{"prompt": "a", "stop": "\\udfff"}'),
        ("/v1/completions", '{"prompt": "a", "bad_words": ["\\ud800"]}'),
        ("/v1/completions", '{"prompt": "a", "request_id": "\\ud800"}'),
        ("/v1/completions", '{"prompt": "a", "\\ud800": 1}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        ("/tokenize", '{"prompt": "\\ud800"}'),
    ],
)
def test_text_that_no_tokenizer_takes(unharmed: RunningServer, path: str, fields: str) -> None:
    """Half a surrogate pair is JSON, and no text."""
    answer = run(ask(unharmed.port, "POST", path, fields.encode()), 20)
    assert answer.status == 400, answer
    assert answer.json()["error"]["message"]


# Other doors.


def test_unix_socket(tmp_path: Path) -> None:
    """Only its owner may use it; a stale one is replaced, one in use is not, and at the end it is removed."""
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    command = [sys.executable, "-m", "quire", "serve", "demo", "--uds", str(path)]
    with (tmp_path / "log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: _status(path) == 200 or process.poll() is not None, 60)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        body = run(ask(path, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 5, "stream": True}), 20).body
        assert events(body)[-1] == "[DONE]"
        assert run(engine_state(path), 20).num_sequences == 0
        code, log = failed_start("demo", "--uds", str(path))
        assert code == 1, log
        assert _status(path) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(GONE_SECONDS) == 0
        assert not path.exists()
    finally:
        process.kill()
        process.wait()


def test_api_key_survives_faults(start_server: Starter) -> None:
    """The key is asked for before the body is looked at, and shown nowhere."""
    key = "sk-very-secret"
    server = start_server("--api-key", key, "--log-level", "debug")

    async def scenario() -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {key}x"}):
            answer = await ask(server.port, "POST", "/v1/completions", b"{", headers)
            assert answer.status == 401
            assert key not in answer.body.decode()
        assert (await ask(server.port, "GET", "/health")).status == 200
        answer = await ask(server.port, "POST", "/v1/completions", b"{", {"Authorization": f"Bearer {key}"})
        assert answer.status == 400

    run(scenario(), 20)
    assert server.golden()[0]
    assert key not in server.log()
