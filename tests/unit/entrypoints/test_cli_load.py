"""The parts of the load generator: the HTTP parser at every split, arrivals, prompts, traces, figures and the plot."""

import asyncio
import math
import signal
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.cli.load import plot, report, workload
from quire.entrypoints.cli.load.client import BrokenConnectionError, Client, _Connection
from quire.entrypoints.cli.load.options import LoadArgs
from quire.entrypoints.cli.load.outcome import Outcome, send, send_all
from quire.entrypoints.cli.load.workload import Shape
from quire.entrypoints.cli.remote import Address
from quire.errors import ConfigError

# ---- the client


class Transport(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


async def exchange(pieces: list[bytes], *, close: bool = False) -> tuple[int, bytes, list[bytes], bool]:
    """Status, body, what went to the sink, and whether the connection may be used again."""
    connection, taken = _Connection(), []
    connection.connection_made(Transport())
    waiting = asyncio.ensure_future(connection.exchange(b"", taken.append))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    if close:
        connection.connection_lost(None)
    status, body = await waiting
    return status, body, taken, connection.reusable


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7;x=y\r\n, world\r\n1\r\n\r\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\nhello, world\r"
OLD = b"HTTP/1.0 200 OK\r\nContent-Length: 13\r\n\r\nhello, world\r"


@given(st.sampled_from([CHUNKED, SIZED, OLD]), st.sets(st.integers(0, 90)))
def test_an_answer_is_the_same_however_it_is_cut(answer: bytes, cuts: set[int]) -> None:
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    pieces = [answer[a:b] for a, b in zip(places, places[1:], strict=False)]
    status, body, taken, reusable = asyncio.run(exchange(pieces))
    assert (status, body, b"".join(taken)) == (200, b"", b"hello, world\r")
    assert reusable == (answer is not OLD)


def test_the_body_of_an_error_goes_not_to_the_sink() -> None:
    answer = b"HTTP/1.1 503 Busy\r\nconnection: Close\r\ncontent-length: 2\r\n\r\nno"
    assert asyncio.run(exchange([answer])) == (503, b"no", [], False)


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n"],
)
def test_what_is_not_http(answer: bytes) -> None:
    with pytest.raises(BrokenConnectionError, match=r"not HTTP/1\.1"):
        asyncio.run(exchange([answer]))


def test_an_answer_cut_short() -> None:
    with pytest.raises(BrokenConnectionError, match="before the answer was complete"):
        asyncio.run(exchange([CHUNKED[:-5]], close=True))


def test_a_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        if len(connections) == 1:
            await reader.readuntil(b"\r\n\r\n")  # the second request gets no answer here
        writer.close()

    async def check() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            client = Client(Address("127.0.0.1", server.sockets[0].getsockname()[1]), {})
            for _ in range(3):
                taken: list[bytes] = []
                assert await client.post("/", b"", taken.append) == (200, b"")
                assert taken == [b"ok"]
            client.close()

    asyncio.run(check())
    assert len(connections) == 3


def test_cancelling_a_request_closes_its_connection() -> None:
    async def check() -> None:
        gone = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(CHUNKED[:60])
            assert await reader.read() == b""
            gone.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            client = Client(Address("127.0.0.1", server.sockets[0].getsockname()[1]), {})
            task = asyncio.create_task(send(client, "/", b"", 0.0))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait_for(gone.wait(), 5)

    asyncio.run(check())


def test_ctrl_c_waits_for_no_more_than_the_next_connection() -> None:
    """Each takes up to a millisecond of the kernel's: all at one go, thousands would take many seconds."""
    begun: list[bytes] = []

    class Connecting(Client):
        async def post(self, path: str, body: bytes, sink: Any) -> tuple[int, bytes]:
            begun.append(body)
            if len(begun) == 3:
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
            return 200, b""

    client = Connecting(Address("127.0.0.1", 1), {})
    assert asyncio.run(send_all(client, "/", [b""] * 1000, [0.0] * 1000, None)) == ([], True)
    assert len(begun) < 10


# ---- the workload


@given(st.integers(1, 200), st.floats(0.01, 1e4), st.sampled_from([0.1, 1.0, 5.0, 1e9]), st.integers(0))
def test_arrivals_keep_their_rate(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = workload.arrival_times(count, rate, burstiness, seed)
    assert len(times) == count
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)
    assert times == workload.arrival_times(count, rate, burstiness, seed)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    """The variance of the gaps, over their mean squared, is 1 / burstiness."""
    for burstiness in (0.5, 1.0, 4.0, 1e9):
        gaps = np.diff(workload.arrival_times(20_000, 3.0, burstiness, 5))
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.1, abs=1e-6)
    assert workload.arrival_times(3, math.inf, 1.0, 0) == [0.0] * 3


@given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 99))
def test_random_lengths_lie_in_their_range(length: int, ratio: float, seed: int) -> None:
    args = LoadArgs(num_prompts=20, random_input_len=length, random_range_ratio=ratio, seed=seed)
    shapes = workload.random_shapes(args, length)
    bounds = (max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)))
    assert all(bounds[0] <= n <= bounds[1] for shape in shapes for n in (shape.input_len, shape.output_len))


def test_prompts_differ_and_can_be_words() -> None:
    shapes = [Shape(0.0, 30, 1)] * 50
    for vocab_size in (1000, None):
        prompts = [request.prompt for request in workload.fill(shapes, vocab_size, LoadArgs())]
        assert len(set(map(str, prompts))) == 50
    assert {len(str(prompt).split()) for prompt in prompts} == {30}


def test_a_csv_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.5000000,100,10\n"
        "2023-11-16 18:17:03.0000000,200,20\n2023-11-16 18:17:05.0000000,300,30\n"
    )
    shapes = workload.read_trace(str(path), 2, scale=0.01)
    assert [(shape.arrival, shape.input_len, shape.output_len) for shape in shapes] == [(0.0, 2, 1), (1.5, 1, 1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no request"),
        ("a,b\n1,2\n", "line 2: a trace has the columns TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,2\n", "line 2"),
        ('{"timestamp": 0}\n', "record 1: Object missing required field"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, content: str | bytes, message: str) -> None:
    (tmp_path / "t").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        workload.read_trace(str(tmp_path / "t"), None, 1.0)


def test_the_published_traces(shared_data: Path) -> None:
    chats = workload.read_trace(str(shared_data / "traces/AzureLLMInferenceTrace_conv.csv"), None, 1.0)
    assert len(chats) == 19_366
    assert (round(fmean(s.input_len for s in chats)), round(fmean(s.output_len for s in chats))) == (1155, 211)
    path = str(shared_data / "traces/mooncake_synthetic.jsonl")
    shapes = workload.read_trace(path, 20, 0.01)
    args = LoadArgs(dataset_name="trace", dataset_path=path, trace_scale=0.01)
    prompts = [request.prompt for request in workload.fill(shapes, 99, args)]
    assert [len(prompt) for prompt in prompts] == [shape.input_len for shape in shapes]


# ---- figures and plot


def outcome(start: float, *times: float, **fields: Any) -> Outcome:
    return Outcome(start, start, times[-1], list(times), 10, len(times), **fields)


def test_figures() -> None:
    failed = Outcome(0.5, 0.5, 0.6, error="HTTP 503", error_message="busy")
    outcomes = [outcome(0.0, 0.1, 0.3, 0.5), outcome(0.2, 0.6), failed]
    figures = report.figures(outcomes, 2.0, {"ttft": 150, "tpot": 250}, [90, 95, 99])
    assert (figures["completed"], figures["failed"], figures["errors_by_kind"]) == (2, 1, {"HTTP 503": 1})
    assert (figures["request_throughput"], figures["request_goodput"]) == (1.0, 0.5)
    assert (figures["output_throughput"], figures["total_token_throughput"]) == (2.0, 12.0)
    assert figures["mean_ttft_ms"] == pytest.approx(250)
    assert figures["mean_tpot_ms"] == pytest.approx(200)  # a single token has none
    assert figures["median_itl_ms"] == pytest.approx(200)
    assert figures["std_e2el_ms"] == pytest.approx(50)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 5), st.booleans()), max_size=30))
def test_any_run_can_be_drawn(runs: list[tuple[float, float, float, bool]]) -> None:
    outcomes = [outcome(start, start + a, start + a + b) for start, a, b, _ in runs]
    for each, (*_, fails) in zip(outcomes, runs, strict=True):
        each.error = "HTTP 503" if fails else None
    figures = report.figures(outcomes, 9.0, {}, [90, 95, 99])
    facts = {"model_id": "<&>", "request_rate": 2.5, "num_prompts": len(runs), "max_concurrency": None}
    drawing = plot.render(outcomes, figures, facts)
    assert ElementTree.fromstring(drawing).get("role") == "img"
    assert not {"nan", "inf", "href"} & set(drawing.lower().replace('"', " ").split())


def test_questions_of_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "talks.json"
    path.write_text(
        '[{"conversations": [{"from": "human", "value": "A question of more than four tokens"}, '
        '{"from": "gpt", "value": "A reply of thirty-two characters"}]}]'
    )
    args = LoadArgs(dataset_name="sharegpt", dataset_path=str(path))
    (request,) = workload.make_requests(args, None, None)
    assert (request.prompt, request.max_tokens) == ("A question of more than four tokens", 8)
