"""A fake `AsyncLLM` behind the real application: no engine, no torch; the tokenizer is the bundled model's."""

import asyncio
import types
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient

from quire.config.engine_args import EngineArgs
from quire.engine.observer import Observer
from quire.entrypoints.server.options import ServerArgs
from quire.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from quire.inputs import PreparedPrompt
from quire.outputs import CompletionOutput, RequestOutput
from quire.protocol.cache import PinnedPrefix
from quire.protocol.stats import SLEEP_STATES, EngineSnapshot, EngineStats, Limits
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer, load_tokenizer
from quire.utils.hub import resolve_model_path


class _FakeStream:
    """An `OutputStream` that merges nothing, and gives all text in outputs."""

    def __init__(self, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        self.listener: Callable[[], object] = bool
        self.finished = False
        self._come: list[RequestOutput | Exception] = []
        self.task = asyncio.create_task(self._follow(outputs))

    async def _follow(self, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async for output in outputs:
                self._come.append(output)
                self.listener()
        except Exception as error:
            self._come.append(error)
            self.listener()

    def text(self) -> str | None:
        return None

    @property
    def is_fresh(self) -> bool:
        return bool(self._come) and not isinstance(self._come[0], Exception)

    def take(self) -> RequestOutput | None:
        if not self._come:
            return None
        found = self._come.pop(0)
        if isinstance(found, Exception):
            raise found
        self.finished = found.finished
        if self._come:
            asyncio.get_running_loop().call_soon(self.listener)
        return found


class FakeAsyncLLM:
    """Answers every request with `words`, one at a time; tests change what it says and what it raises."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer: Tokenizer | None = tokenizer
        self.model_config = types.SimpleNamespace(max_model_len=1024, vocab_size=4096, generation_defaults={})
        self.config = types.SimpleNamespace(model=self.model_config, args=EngineArgs())
        self.observer = Observer()
        self.num_blocks = 64
        self.num_unfinished = 3
        self.limits = Limits(8, 100, "fcfs", {}, 8, 100)
        self.words = ["Once ", "more ", "é."]
        self.pause = 0.0  # seconds before each
        self.failure: Exception | None = None  # raised after the words
        self.dead: EngineDeadError | None = None
        self.death = asyncio.Event()
        self.requests: list[tuple[Any, SamplingParams]] = []
        self.rendered: list[dict[str, Any]] = []
        self.pinned: list[tuple[Any, bool]] = []
        self.is_idle = True
        self.paused, self.pauses = False, list[dict[str, Any]]()
        self.slept: list[int] = []  # levels
        self.sleep_modes: list[str | None] = []
        self.num_aborted = self.num_shutdowns = 0

    async def pin_prefix(self, prompt: Any, name: str | None, add_special_tokens: bool = True) -> PinnedPrefix:
        await self.check_health()
        self.pinned.append((prompt, add_special_tokens))
        if prompt.get("prompt") == "":
            raise InvalidRequestError("the prompt is empty.", "prompt")
        return PinnedPrefix(name or "prefix-0", 32, 2)

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        return [PinnedPrefix("system", 32, 2)]

    async def unpin_prefix(self, name: str) -> bool:
        return name == "system"

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self.is_idle or reset_running_requests

    async def sleep(self, level: int, mode: str | None = None) -> bool:
        self.sleep_modes.append(mode)
        self.slept = [*self.slept, level] if self.is_idle else self.slept
        return self.is_idle

    async def wake_up(self, tags: list[str] | None) -> None:
        self.slept = self.slept if tags == ["weights"] else []

    async def pause_generation(self, **options: Any) -> None:
        self.pauses.append(options)
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def is_sleeping(self) -> bool:
        return bool(self.slept)

    async def update_weights(self, path: str) -> bool:
        if path == "/nowhere":
            raise RequestFailedError("update_weights: /nowhere has no weights.")
        return self.is_idle

    async def set_limits(self, **changes: Any) -> Limits:
        self.limits = msgspec.structs.replace(self.limits, **changes)
        return self.limits

    @property
    def errored(self) -> bool:
        return self.dead is not None

    async def prepare(self, prompt: Any, params: SamplingParams, add_special_tokens: bool = True) -> PreparedPrompt:
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is None:
            token_ids = await self.token_ids(text, add_special_tokens)
        return PreparedPrompt(token_ids, text, params, prompt.get("cache_salt"))

    async def find_adapter(self, request: Any) -> None:
        assert request is None

    @asynccontextmanager
    async def open(self, prompt: PreparedPrompt, params: None, request_id: str, *_: Any):
        await self.check_health()
        self.requests.append((prompt, prompt.params))
        stream = _FakeStream(self._outputs(request_id))
        try:
            yield stream
        finally:
            stream.task.cancel()
            self.num_aborted += not stream.finished

    async def _outputs(self, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        for place, word in enumerate(self.words):
            await asyncio.sleep(self.pause)
            await self.check_health()
            last = place == len(self.words) - 1 and self.failure is None
            part = CompletionOutput(0, word, [place], finish_reason="stop" if last else None)
            yield RequestOutput(request_id, None, [1, 2], outputs=[part], finished=last)
        if self.failure is not None:
            raise self.failure

    async def token_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens)

    async def render_chat(self, messages: Any, **options: Any) -> str:
        self.rendered.append(options)
        return "|".join(f"{m['role']}:{m['content']}" for m in messages)

    def check_room(self, num_requests: int) -> None:
        pass

    async def check_health(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))

    async def wait_dead(self) -> EngineDeadError:
        await self.death.wait()
        assert self.dead is not None
        return self.dead

    def die(self) -> None:
        self.dead = EngineDeadError("the engine is dead: it was shot.")
        self.death.set()

    async def snapshot(self, mark: str | None = None) -> EngineSnapshot:
        await self.check_health()
        return EngineSnapshot(self.stats(), [], 0, bytes(self.num_blocks), 16)

    def stats(self) -> EngineStats:
        return EngineStats(kv_cache_usage_perc=0.25, sleep_state=SLEEP_STATES[max(self.slept, default=0)])

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def end_requests(self) -> None:
        self.num_shutdowns += 1
        self.dead = self.dead or EngineDeadError("the engine was shut down.")
        self.death.set()


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model_path("demo", None))


@pytest.fixture
def async_llm(demo_tokenizer: Tokenizer) -> FakeAsyncLLM:
    """The engine behind `make_client` and `make_state`."""
    return FakeAsyncLLM(demo_tokenizer)


@pytest.fixture
def make_state(async_llm: FakeAsyncLLM) -> Callable[..., Any]:
    """Makes the state of a server with these options (`ServerArgs`); the model is "demo"."""
    from quire.entrypoints.server.state import ServerState

    def make(**options: Any) -> Any:
        args = ServerArgs(**options)
        return ServerState(async_llm, args, args.served_model_name or ["demo"], created=1)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_client(make_state: Callable[..., Any]) -> Callable[..., TestClient]:
    """Makes an HTTP client of an application with these options."""
    from quire.entrypoints.server.app import build_app

    return lambda **options: TestClient(build_app(make_state(**options)))


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    """An HTTP client of an application with the default options."""
    return make_client()
