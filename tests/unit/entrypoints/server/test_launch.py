"""A server on a real socket around a fake engine: start, stop, deadlines; and its address."""

import asyncio
import json
import logging
import os
import shutil
import socket
import ssl
import stat
import subprocess
import time
import warnings
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.entrypoints.server import launch
from quire.entrypoints.server.address import bound_socket, describe_address, ssl_context
from quire.entrypoints.server.launch import Server, log_throughput, read_chat_template, watch_stalls
from quire.entrypoints.server.metrics import ServingMetrics
from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError, EngineDeadError, QuireError
from quire.protocol.stats import EngineStats
from quire.sampling_params import SamplingParams

State = Callable[..., Any]


@asynccontextmanager
async def running(state: Any, context: ssl.SSLContext | None = None) -> AsyncGenerator[tuple[Server, int], None]:
    """A server and its port; at the end it is told to stop, if it was not, and has to."""
    with bound_socket(ServerArgs(host="127.0.0.1", port=0)) as listener:
        port = listener.getsockname()[1]
        server = Server(state, context)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield server, port
        if not server.should_exit:
            server.stop()
        await asyncio.wait_for(task, 20)


async def connect(port: int, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def ask(port: int, data: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    reader, writer = await connect(port, data)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer


def request(path: str, body: dict[str, Any] | None = None) -> bytes:
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: x", "connection: close"]
    content = b"" if body is None else json.dumps(body).encode()
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


STREAM = request("/v1/completions", {"prompt": "x", "stream": True})


def many_words(llm: Any, seconds: float) -> None:
    llm.words, llm.pause = ["word "] * 1000, seconds / 1000


# ---- stopping


def test_a_server_serves_and_stops(make_state: State, async_llm: Any) -> None:
    async def story() -> None:
        async with running(make_state()) as (server, port):
            answer = await ask(port, request("/health"))
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\r\nserver:" not in answer
        assert server.death is None
        with pytest.raises(ConnectionRefusedError):
            await connect(port)

    asyncio.run(story())
    assert async_llm.num_shutdowns == 1


@pytest.mark.slow
def test_running_requests_may_finish(make_state: State, async_llm: Any) -> None:
    many_words(async_llm, seconds=1)

    async def story() -> bytes:
        async with running(make_state(shutdown_timeout=60)) as (server, port):
            stream, idle = asyncio.create_task(ask(port, STREAM)), await connect(port)
            while not async_llm.requests:
                await asyncio.sleep(0.01)
            server.stop()
            assert await asyncio.wait_for(idle[0].read(), 5) == b""  # closed at once
            return await stream

    answer = asyncio.run(story())
    assert answer.count(b"word ") == 1000
    assert b"error" not in answer
    assert b"data: [DONE]" in answer


@pytest.mark.parametrize(("timeout", "num_signals"), [(0, 1), pytest.param(600, 2, marks=pytest.mark.slow)])
def test_what_is_left_ends_with_an_error(make_state: State, async_llm: Any, timeout: int, num_signals: int) -> None:
    many_words(async_llm, seconds=600)

    async def story() -> bytes:
        async with running(make_state(shutdown_timeout=timeout)) as (server, port):
            reader, writer = await connect(port, STREAM)
            await reader.readuntil(b"word ")
            for _ in range(num_signals):
                server.stop()
                await asyncio.sleep(0.3)
            rest = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return rest

    answer = asyncio.run(story())
    assert b'data: {"error":{"message":"the engine was shut down."' in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_reader_that_is_too_slow_does_not_hold_up_the_end(
    make_state: State, async_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_FLUSH_SECONDS", 0.2)
    async_llm.words = ["x" * 100_000] * 1000

    async def story() -> None:
        async with running(make_state()) as (server, port):
            reader, writer = await connect(port, STREAM)
            await reader.readexactly(1000)
            server.stop()
        writer.close()

    asyncio.run(story())


def test_the_live_view_does_not_hold_up_the_end(make_state: State) -> None:
    async def story() -> bytes:
        async with running(make_state(shutdown_timeout=600)) as (server, port):
            reader, writer = await connect(port, request("/live"))
            await reader.readuntil(b"event: ")
            server.stop()
            rest = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return rest

    assert b"event: ended" in asyncio.run(story())


def test_the_engines_death_ends_the_server(make_state: State, async_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_DEAD_SECONDS", 0.3)
    many_words(async_llm, seconds=600)

    async def story() -> tuple[bytes, bytes, EngineDeadError | None]:
        async with running(make_state(shutdown_timeout=600)) as (server, port):
            stream = asyncio.create_task(ask(port, STREAM))
            while not async_llm.requests:
                await asyncio.sleep(0.01)
            async_llm.die()
            health, answer = await ask(port, request("/health")), await stream
            while not server.should_exit:
                await asyncio.sleep(0.01)
        return health, answer, server.death

    health, answer, death = asyncio.run(story())
    assert health.startswith(b"HTTP/1.1 503 ")
    assert b'"message":"the engine is dead: it was shot."' in answer
    assert str(death) == "the engine is dead: it was shot."


# ---- what clients send, and don't


LONG_BODY = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HT",
        LONG_BODY,
        *(pytest.param(text, marks=pytest.mark.slow) for text in (b"", b"GET /health HTTP/1.1\r\nhost: x\r\n")),
    ],
)
def test_a_request_that_never_ends_is_given_up(make_state: State, first: bytes) -> None:
    async def story() -> None:
        async with running(make_state(timeout_headers=0.3, timeout_body=0.4)) as (_, port):
            reader, writer = await connect(port, first)

            async def dribble() -> None:
                while first:
                    await asyncio.sleep(0.05)
                    writer.write(b"x")

            dribbler = asyncio.create_task(dribble())
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            dribbler.cancel()

    asyncio.run(story())


@pytest.mark.slow
def test_deadlines_are_for_each_request_anew(make_state: State, async_llm: Any) -> None:
    many_words(async_llm, seconds=3)

    async def ask_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause: float) -> None:
        writer.write(b"GET /health HTTP/1.1\r\n")
        await asyncio.sleep(pause)
        writer.write(b"host: x\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 200")

    async def again_and_again(port: int) -> None:
        connection = await connect(port)
        for _ in range(3):
            await ask_slowly(*connection, pause=1)

    async def after_a_rest(port: int) -> None:
        connection = await connect(port)
        await ask_slowly(*connection, pause=0)
        await asyncio.sleep(2.5)  # idle, which the keep-alive timeout bounds
        await ask_slowly(*connection, pause=0)

    async def with_a_long_answer(port: int) -> None:
        reader, _ = await connect(port, STREAM)  # takes longer to answer than to send
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.count(b"word ") == 1000

    async def story() -> None:
        async with running(make_state(timeout_headers=2, timeout_body=2, timeout_keep_alive=60)) as (_, port):
            await asyncio.gather(again_and_again(port), after_a_rest(port), with_a_long_answer(port))

    asyncio.run(story())


@pytest.mark.parametrize("leave", ["write_eof", pytest.param("close", marks=pytest.mark.slow)])
def test_a_client_that_leaves_ends_its_request(make_state: State, async_llm: Any, leave: str) -> None:
    many_words(async_llm, seconds=600)

    async def story() -> None:
        async with running(make_state(shutdown_timeout=10)) as (_, port):
            reader, writer = await connect(port, STREAM)
            await reader.readuntil(b"word ")
            getattr(writer, leave)()
            while not async_llm.num_aborted:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), 20))


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000,
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    ],
)
def test_what_is_no_http(make_state: State, data: bytes) -> None:
    async def story() -> bytes:
        async with running(make_state()) as (_, port):
            return await ask(port, data)

    head, _, body = asyncio.run(story()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_body_that_turns_bad_while_it_comes(make_state: State) -> None:
    start = (
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )

    async def story() -> bytes:
        async with running(make_state()) as (_, port):
            reader, writer = await connect(port, start + b"1\r\n{\r\n")
            await asyncio.sleep(0.1)
            writer.write(b"no length\r\n")
            return await asyncio.wait_for(reader.read(), 10)

    assert asyncio.run(story()).startswith(b"HTTP/1.1 400")


def test_what_turns_bad_once_it_is_answered_gets_no_second_answer(make_state: State) -> None:
    """But for a request that follows on the connection: that is another one."""
    start = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n"

    async def story(*rest: bytes) -> bytes:
        async with running(make_state(api_key=["k"])) as (_, port):
            reader, writer = await connect(port, start)
            head = await reader.readuntil(b"}}")
            for part in rest:
                writer.write(part)
                await asyncio.sleep(0.1)
            return head + await asyncio.wait_for(reader.read(), 10)

    answered = asyncio.run(story(b"no length\r\n"))
    assert (answered[:12], answered.count(b"HTTP/1.1")) == (b"HTTP/1.1 401", 1)
    both = asyncio.run(story(b"0\r\n\r\n", b"no request\r\n\r\n"))
    assert [line[:12] for line in both.split(b"\r\n") if line.startswith(b"HTTP")][:1] == [b"HTTP/1.1 401"]
    assert b"HTTP/1.1 400" in both


# ---- the event loop


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_bodies_of_tiny_chunks_do_not_hold_the_event_loop(make_state: State, method: str) -> None:
    """Each byte of them costs as much as a whole body: others have their turn meanwhile, and all of it is read."""
    text = b"{" * 40_000
    path = b"/tokenize" if method == "POST" else b"/version"
    head = method.encode() + b" %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % path
    body = b"transfer-encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    num_turns = 0

    async def watch() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def story() -> bytes:
        async with running(make_state()) as (_, port):
            watcher = asyncio.create_task(watch())
            answer = await ask(port, head + body + last)
            watcher.cancel()
            return answer

    answer = asyncio.run(story())
    assert answer.startswith(b"HTTP/1.1 400" if method == "POST" else b"HTTP/1.1 200"), answer
    assert answer.count(b"HTTP/1.1 200") == 1 + (method == "GET"), "what follows on the connection is answered"
    assert num_turns > len(text) / 100


@pytest.mark.parametrize(("num_in_flight", "seconds"), [(1, 0.3), (0, 0.6)])
def test_stalls_of_the_event_loop_are_measured(num_in_flight: int, seconds: float) -> None:
    """Of an idle server's those that are longer than it sleeps."""
    state: Any = SimpleNamespace(metrics=ServingMetrics(), num_in_flight=num_in_flight)

    async def story() -> None:
        watcher = asyncio.create_task(watch_stalls(state))
        await asyncio.sleep(0.05)
        time.sleep(seconds)
        await asyncio.sleep(0.05)
        watcher.cancel()

    asyncio.run(story())
    assert 0.2 < state.metrics.event_loop_max_stall < 10


def test_a_store_that_cannot_be_used_is_told_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "load", lambda *_: pytest.fail("it loads"))
    store = str(tmp_path / "no" / "responses.db")
    with pytest.raises(ConfigError, match="^response_store .* can't be used as an SQLite file"):
        launch.serve(ServerArgs(port=0, response_store=store), EngineArgs(model="demo"))


def test_an_idle_server_looks_at_its_event_loop_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    state: Any = SimpleNamespace(metrics=ServingMetrics(), num_in_flight=0)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        state.num_in_flight = 1
        if len(slept) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch_stalls(state))
    assert slept[0] >= 10 * slept[1]


@pytest.mark.parametrize("disable_log_stats", [False, True])
def test_no_line_of_how_fast_it_is_where_it_is_not_to_log_stats(
    disable_log_stats: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args, stats = EngineArgs(disable_log_stats=disable_log_stats), EngineStats(num_requests_running=1)
    llm = SimpleNamespace(config=SimpleNamespace(args=args), stats=lambda: stats)
    state: Any = SimpleNamespace(metrics=ServingMetrics(), llm=llm)
    monkeypatch.setattr(launch, "_LOG_SECONDS", 0.01)

    async def story() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(log_throughput(state), 0.2)

    with caplog.at_level(logging.INFO, "quire"):
        asyncio.run(story())
    assert any("generation 0.0 tokens/s; running 1" in line for line in caplog.messages) is not disable_log_stats


# ---- the address


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for host in ("127.0.0.1", None):
            with pytest.raises(QuireError, match=f"port {port}: Address already in use"):
                bound_socket(ServerArgs(host=host, port=port)).__enter__()


def test_a_port_taken_while_the_model_is_loaded(make_state: State) -> None:
    async def story(listener: socket.socket) -> None:
        await Server(make_state(), None).serve(sockets=[listener])

    with bound_socket(ServerArgs(host="127.0.0.1", port=0)) as listener, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(listener.getsockname())
        other.listen()
        with pytest.raises(QuireError, match="can't listen: Address already in use"):
            asyncio.run(story(listener))


def test_a_name_of_both_kinds_is_listened_at_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM does: localhost is ::1 first on most systems, and 127.0.0.1 is what scripts ask."""
    found = [(socket.AF_INET6, 1, 6, "", ("::1", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with bound_socket(ServerArgs(host="localhost", port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_an_unknown_host() -> None:
    with pytest.raises(ConfigError, match="host 'no such host' is not known"):
        bound_socket(ServerArgs(host="no such host")).__enter__()


def test_unix_sockets(tmp_path: Path) -> None:
    args = ServerArgs(uds=str(tmp_path / "socket"))
    with bound_socket(args) as listener:
        assert stat.S_IMODE(os.stat(tmp_path / "socket").st_mode) == 0o600
        assert describe_address(listener, args) == f"the Unix socket {tmp_path}/socket"
        listener.listen()
        with pytest.raises(QuireError, match="Address already in use"):
            bound_socket(args).__enter__()
    assert not (tmp_path / "socket").exists()
    with socket.socket(socket.AF_UNIX) as left:  # by a server that was killed
        left.bind(str(tmp_path / "socket"))
    with bound_socket(args):
        pass
    (tmp_path / "file").write_text("mine")
    with pytest.raises(QuireError, match="can't listen on the Unix socket"):
        bound_socket(ServerArgs(uds=str(tmp_path / "file"))).__enter__()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"host": "127.0.0.1"}, "http://127.0.0.1:PORT (docs: /docs, playground: /)"),
        ({}, "http://127.0.0.1:PORT (all interfaces, and no API key; docs: /docs, playground: /)"),
        ({"api_key": ["k"]}, "http://127.0.0.1:PORT (all interfaces; docs: /docs, playground: /)"),
        ({"host": "127.0.0.1", "root_path": "/x"}, "http://127.0.0.1:PORT/x (docs: /x/docs, playground: /x/)"),
        (
            {"host": "127.0.0.1", "root_path": "/x", "disable_fastapi_docs": True},
            "http://127.0.0.1:PORT/x (playground: /x/)",
        ),
    ],
)
def test_what_people_are_told(options: dict[str, Any], shown: str) -> None:
    args = ServerArgs(port=0, **options)
    with bound_socket(args) as listener:
        assert describe_address(listener, args) == shown.replace("PORT", str(listener.getsockname()[1]))


# ---- files


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_https(make_state: State, tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl_context(ServerArgs(ssl_keyfile=key, ssl_certfile=certificate))
    trusting = ssl.create_default_context(cafile=certificate)

    async def story() -> bytes:
        async with running(make_state(), context) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            writer.write(request("/health"))
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return answer

    assert asyncio.run(story()).startswith(b"HTTP/1.1 200")
    with pytest.raises(ConfigError, match="can't be used"):
        ssl_context(ServerArgs(ssl_keyfile=certificate, ssl_certfile=certificate))
    named = ssl_context(
        ServerArgs(ssl_keyfile=key, ssl_certfile=certificate, ssl_ciphers="ECDHE-ECDSA-AES256-GCM-SHA384")
    )
    assert named is not None
    older = {cipher["name"] for cipher in named.get_ciphers() if cipher["protocol"] != "TLSv1.3"}
    assert older == {"ECDHE-ECDSA-AES256-GCM-SHA384"}
    with pytest.raises(ConfigError, match="or ssl_ciphers can't be used: .*No cipher can be selected"):
        ssl_context(ServerArgs(ssl_keyfile=key, ssl_certfile=certificate, ssl_ciphers="none such"))
    given = {"ssl_keyfile": key, "ssl_certfile": certificate, "ssl_ca_certs": certificate}
    for name in given:
        with pytest.raises(ConfigError, match=f"^{name} '.*/gone' is not there, or can't be read by this user; name a"):
            ssl_context(ServerArgs(**given | {name: str(tmp_path / "gone")}))


def test_chat_templates(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert read_chat_template(None) is None
    assert read_chat_template("{{ x }}") == "{{ x }}"
    assert read_chat_template(str(tmp_path / "chat.jinja")) == "{{ messages }}"
    (tmp_path / "marked.jinja").write_text("{{ messages }}", encoding="utf-8-sig")
    assert read_chat_template(str(tmp_path / "marked.jinja")) == "{{ messages }}", "each prompt would begin with a BOM"
    with pytest.raises(ConfigError, match=r"can't be read \(No such file"):
        read_chat_template(str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"can't be read \(a device has no end\)"):
        read_chat_template("/dev/zero")


@pytest.mark.parametrize(
    ("options", "web_level"),
    [({}, logging.ERROR), ({"log_level": "debug"}, logging.WARNING), ({"uvicorn_log_level": "info"}, logging.INFO)],
)
def test_the_web_servers_own_log(options: dict[str, Any], web_level: int) -> None:
    loggers = [logging.getLogger(name) for name in ("quire", "uvicorn")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    try:
        with warnings.catch_warnings(record=True) as told:
            launch._configure_logging(ServerArgs(**options))
            SamplingParams(temperature=0.005)
        assert not told, "a client could fill the log, and the memory, with one for each of its temperatures"
        assert logging.getLogger("uvicorn.error").getEffectiveLevel() == web_level
    finally:
        for logger, (handlers, own_level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(own_level)
