"""GET /live: the event stream that keeps the page's view of the engine current.

While anybody looks, a single task asks the engine for a snapshot twice a second, and all who look get the same bytes; a
slow reader misses some. Nobody looking costs nothing.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.server.block_map import BlockMap
from quire.entrypoints.server.metrics import ServingMetrics
from quire.entrypoints.server.state import get_state
from quire.errors import EngineDeadError
from quire.utils.logs import logger

router = APIRouter(include_in_schema=False)

_INTERVAL = 0.5  # seconds between snapshots
_PAGE = "page-"  # in the ids that the page gives its requests: each finds its own, however many wait
_NUM_NEWEST = 5  # seconds of history in each event: an event may be late, or missed


class LiveFeed:
    """Snapshots of an engine, made while there are viewers."""

    def __init__(self, llm: AsyncLLM, metrics: ServingMetrics) -> None:
        self._llm, self._metrics = llm, metrics
        self._num_viewers = 0
        self._newest = b""
        self._ended = False
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events for one viewer: "history" first, then a "snapshot" now and again, "ended" last."""
        self._num_viewers += 1
        if self._task is None:
            self._newest, self._ended = b"", False
            self._task = asyncio.create_task(self._run())
        try:
            self._metrics.advance(time.monotonic())
            seen = self._newest
            yield _event("history", {"seconds": list(self._metrics.history.seconds)}) + seen
            while not (self._ended and seen is self._newest):
                if seen is self._newest:
                    await self._changed.wait()
                seen = self._newest
                yield seen
        finally:
            self._num_viewers -= 1
            if not self._num_viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    def close(self, reason: str = "the server is shutting down.") -> None:
        """End all streams."""
        self._tell(_event("ended", {"message": reason}), last=True)

    async def _run(self) -> None:
        while not self._ended:
            try:
                self._tell(await self._snapshot())
            except EngineDeadError as error:
                self.close(str(error))
            except Exception:  # a viewer must not wait for ever
                logger.exception("the live view's snapshot failed")
                self.close("the live view failed; the server's log says why.")
            await asyncio.sleep(_INTERVAL)

    def _tell(self, event: bytes, last: bool = False) -> None:
        self._newest, self._ended = event, last
        self._changed.set()
        self._changed = asyncio.Event()

    async def _snapshot(self) -> bytes:
        metrics = self._metrics
        snapshot = await self._llm.snapshot(_PAGE)
        metrics.on_engine_stats(snapshot.stats, time.monotonic())  # an idle engine tells nothing by itself
        told = msgspec.structs.asdict(snapshot)  # sequences: the first few hundred, and the page's
        told["blocks"] = BlockMap.of(snapshot.blocks, told.pop("block_groups"))
        newest = told | {
            "seconds": list(metrics.history.seconds)[-_NUM_NEWEST:],
            "num_prompt_tokens": metrics.num_prompt_tokens,  # this and those below: since the start
            "num_generation_tokens": metrics.num_generation_tokens,
            "finished": metrics.finished,  # finish reason -> sequences
            "is_paused": await self._llm.is_paused(),
        }
        return _event("snapshot", newest)


def _event(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


@router.get("/live")
async def live(request: Request, model: str | None = None) -> StreamingResponse:
    """The event stream of the page. `model`: which, where there are several; looking loads none."""
    state, name = get_state(request), get_state(request).check_model(model)
    if (loaded := state.loaded(name)) is None:
        events = [_event("ended", {"message": f"{name} is not loaded; a request to it loads it."})]
    else:
        loaded.live_feed = loaded.live_feed or LiveFeed(loaded.llm, loaded.metrics)
        events = loaded.live_feed.watch()
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")
