"""The page's headers and the event stream behind it, over a fake engine."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from quire.entrypoints.server import live
from quire.entrypoints.server.live import LiveFeed
from quire.entrypoints.server.metrics import ServingMetrics
from quire.entrypoints.server.options import ServerArgs
from quire.entrypoints.server.state import ServerState, get_state
from quire.errors import EngineDeadError
from quire.protocol.stats import EngineSnapshot, EngineStats, SequenceSnapshot


class FakeLLM:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.metrics = ServingMetrics()
        self.num_asked = 0
        self.error: Exception | None = None

    async def is_paused(self) -> bool:
        return self.num_asked > 1

    async def snapshot(self, mark: str | None = None) -> EngineSnapshot:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        stats = EngineStats(1, 0, 0.5, 0, 10, 5, {})
        sequence = SequenceSnapshot("<b>id</b>", 0, "running", 5, 1, 6, 0, 1, None, 0.5)
        return EngineSnapshot(stats, [sequence], 1, bytes([2, 0]), 16)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by a clock of its own: the machine's may have begun a minute ago, and has no five minutes to tell of then."""
    monkeypatch.setattr(live, "_INTERVAL", 0.01)
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: 1000.0))


def events(data: bytes) -> list[tuple[str, Any]]:
    """Names and contents of events."""
    found = re.findall(rb"event: (\w+)\ndata: (.*)\n\n", data)
    return [(name.decode(), json.loads(content)) for name, content in found]


def run(check: Callable[[FakeLLM, LiveFeed], Coroutine[Any, Any, None]]) -> None:
    """Run a check for ten seconds at most: a stream that hangs fails."""
    llm = FakeLLM()
    asyncio.run(asyncio.wait_for(check(llm, LiveFeed(llm, llm.metrics)), 10))  # type: ignore[arg-type]


async def rest(stream: AsyncGenerator[bytes, None]) -> list[tuple[str, Any]]:
    return events(b"".join([part async for part in stream]))


def test_a_viewer_gets_the_history_and_then_snapshots() -> None:
    async def check(llm: FakeLLM, feed: LiveFeed) -> None:
        llm.metrics.advance(10.0)
        stream = feed.watch()
        ((name, history),) = events(await anext(stream))
        assert name == "history"
        assert len(history["seconds"]) == 300
        ((name, snapshot),) = events(await anext(stream))
        assert name == "snapshot"
        assert snapshot["sequences"][0]["request_id"] == "<b>id</b>"
        assert base64.b64decode(snapshot["blocks"]["cells"]) == bytes([0xF0, 0])
        assert snapshot["blocks"]["num_used"] == 1
        assert snapshot["finished"]["stop"] == 0
        assert snapshot["is_paused"] is False
        ((_, snapshot),) = events(await anext(stream))
        assert snapshot["is_paused"] is True
        await stream.aclose()

    run(check)


def test_nobody_looking_costs_nothing() -> None:
    async def check(llm: FakeLLM, feed: LiveFeed) -> None:
        await asyncio.sleep(0.05)
        assert llm.num_asked == 0
        streams = [feed.watch() for _ in range(20)]
        for stream in streams:
            await anext(stream)
        firsts = [await anext(stream) for stream in streams]
        assert len(set(firsts)) == 1  # one snapshot, the same bytes for all
        assert llm.num_asked == 1
        for stream in streams:
            await stream.aclose()
        asked = llm.num_asked
        await asyncio.sleep(0.05)
        assert llm.num_asked == asked
        again = feed.watch()
        await anext(again)
        await anext(again)
        assert llm.num_asked == asked + 1
        await again.aclose()

    run(check)


def test_a_slow_viewer_misses_snapshots_and_no_ending() -> None:
    async def check(llm: FakeLLM, feed: LiveFeed) -> None:
        stream = feed.watch()
        await anext(stream)
        while llm.num_asked < 5:
            await asyncio.sleep(0.01)
        assert [name for name, _ in events(await anext(stream))] == ["snapshot"]
        llm.error = EngineDeadError("the engine is dead: it was shot.")
        await asyncio.sleep(0.05)
        assert await rest(stream) == [("ended", {"message": "the engine is dead: it was shot."})]
        late = await rest(feed.watch())
        assert [name for name, _ in late] == ["history", "ended"]
        llm.error = None
        recovered = feed.watch()
        await anext(recovered)
        assert [name for name, _ in events(await anext(recovered))] == ["snapshot"]
        await recovered.aclose()

    run(check)


def test_a_failure_is_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    async def check(llm: FakeLLM, feed: LiveFeed) -> None:
        llm.error = RuntimeError("/secret/path")
        ended = (await rest(feed.watch()))[-1]
        assert ended == ("ended", {"message": "the live view failed; the server's log says why."})
        assert "/secret/path" in caplog.text

    run(check)


def test_closing_ends_every_stream() -> None:
    async def check(llm: FakeLLM, feed: LiveFeed) -> None:
        streams = [feed.watch() for _ in range(3)]
        for stream in streams:
            await anext(stream)
        feed.close()
        for stream in streams:
            assert (await rest(stream))[-1][0] == "ended"

    run(check)


@pytest.fixture
def http() -> tuple[FakeLLM, TestClient]:
    """A client of an application with these routes alone."""
    app, llm = FastAPI(), FakeLLM()
    app.state.quire = ServerState(llm, ServerArgs(), ["demo"])  # type: ignore[arg-type]
    assert get_state(type("Request", (), {"app": app, "scope": {}})()) is app.state.quire  # type: ignore[arg-type]
    app.include_router(live.router)
    return llm, TestClient(app)


def test_the_stream_over_http(http: tuple[FakeLLM, TestClient]) -> None:
    llm, client = http
    llm.error = EngineDeadError("gone.")
    answer = client.get("/live")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert [name for name, _ in events(answer.content)] == ["history", "ended"]
