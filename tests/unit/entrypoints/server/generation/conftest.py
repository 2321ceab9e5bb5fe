"""The real front end (`AsyncLLM`, the app) over a scripted core: texts, logprobs and endings are known beforehand."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quire.config.engine_args import EngineArgs
from quire.engine import async_inputs
from quire.engine.async_llm import AsyncLLM, AsyncOptions
from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.dialects.chat import read_chat
from quire.entrypoints.server.dialects.completions import read_completion
from quire.entrypoints.server.options import ServerArgs
from quire.entrypoints.server.service import TurnService
from quire.entrypoints.server.state import ServerState
from quire.protocol.core import Abort, Add, Dead, Finish, News, Ready
from quire.protocol.requests import NewRequest, PoolingTask, SamplingTask
from quire.protocol.stats import EngineStats
from quire.protocol.step import Failure, PromptLogprobs, SequenceOutput, TokenLogprobs
from quire.text.renderer import Renderer, RenderLane
from quire.text.tokenizer import Tokenizer

STATS = EngineStats()
MAX_LEN = 128
EOS = 0


class ScriptedCore:
    """A core that answers with `texts[sequence index]`, and end-of-sequence after it.

    Attributes:
        stride: tokens a step.
        requests: all that were added.
        aborted: ids that were aborted.
        held: where set, steps wait for `go_on`.
        ending: "abort" or "error": how a request ends in step `ends_at` (from 0), in place of its text.
        failure: why, if it is "error".
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.texts = ["Once upon a time there was a café.", "Twice 🙂 told", "Thrice", "Four"]
        self.requests: list[NewRequest] = []
        self.aborted: list[str] = []
        self.held = False
        self.stride = 1
        self.go_on = asyncio.Event()
        self.ending: str | None = None
        self.ends_at = 2
        self.failure: Failure | None = None
        self.pooled: Callable[[list[int]], list[float]] = lambda token_ids: [3.0, 4.0, 12.0]
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped: set[tuple[str, int]] = set()
        self._emit: Callable[[Any], None] = lambda event: None

    def attach(self, on_event: Callable[[Any], None]) -> None:
        self._emit = on_event

    def send(self, command: Any) -> None:
        if isinstance(command, Add):
            self.requests.append(command.request)
            self._tasks[command.request.request_id] = asyncio.get_running_loop().create_task(self._run(command.request))
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                self.aborted.append(request_id)
                self._tasks[request_id].cancel()
        elif isinstance(command, Finish):
            self._stopped.update(command.sequences)

    def die(self) -> None:
        self._emit(Dead("it was shot"))

    def seconds_stuck(self) -> float:
        return 0.0

    def close(self) -> None:
        pass

    async def _run(self, request: NewRequest) -> None:
        scripts = {
            i: [*self.tokenizer.encode(self.texts[i % len(self.texts)], add_special_tokens=False), EOS]
            for i in range(_task(request).num_sequences)
        }
        step = 0
        while scripts:
            await asyncio.sleep(0.001)
            if self.held:
                await self.go_on.wait()
            scripts = {i: script for i, script in scripts.items() if (request.request_id, i) not in self._stopped}
            news = [self._token(request, i, script, step) for i, script in scripts.items()]
            if news:
                scheduled = [request.request_id] if step == 0 else []
                self._emit(News(outputs=news, scheduled=scheduled, start=0.0, end=0.0, stats=STATS))
            scripts = {n.sequence_index: scripts[n.sequence_index] for n in news if n.finish_reason is None}
            step += self.stride

    def _token(self, request: NewRequest, index: int, script: list[int], step: int) -> SequenceOutput:
        task = _task(request)
        params = task.params
        token_ids = script[step : step + self.stride]
        reason = "stop" if token_ids[-1] in task.stop_token_ids else None
        if reason is None and step + len(token_ids) == min(task.max_tokens, len(script)):
            reason = "length"
        if self.ending is not None and step == self.ends_at:
            reason = self.ending
        prompt = None
        if step == 0 and index == 0 and params.prompt_logprobs is not None:
            ids = request.prompt_token_ids[1:]
            prompt = PromptLogprobs(1, [logprobs_of(i, params.prompt_logprobs) for i in ids])
        return SequenceOutput(
            request_id=request.request_id,
            sequence_index=index,
            new_token_ids=token_ids,
            logprobs=None if params.logprobs is None else [logprobs_of(each, params.logprobs) for each in token_ids],
            prompt_logprobs=prompt,
            finish_reason=reason,
            num_cached_tokens=3,
            failure=self.failure if reason == "error" else None,
            pooled=self.pooled(request.prompt_token_ids) if isinstance(task, PoolingTask) else None,
        )


def _task(request: NewRequest) -> SamplingTask:
    assert isinstance(request.task, SamplingTask)
    return request.task


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """The token is the second likeliest, if so many are asked for."""
    top = [token_id ^ 1, token_id, *(range(1000, 1000 + num_top))][:num_top]
    ranks = [1 + i for i in range(num_top)]
    return TokenLogprobs([token_id, *top], [-0.7, *([-0.6, -0.7] + [-float(r) for r in ranks])[:num_top]], [2, *ranks])


class KeptLane(RenderLane):
    """A lane whose processes are there for the next server too: to start them takes longer than most tests."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__(name, width)
        self._renderers, self._idle = [], [*_kept_renderers(name, width)]


@cache
def _kept_renderers(name: str, width: int) -> list[Renderer]:
    return [Renderer() for _ in range(width)]


class Server:
    """A server's state over a `ScriptedCore`, for calls of its services and over HTTP."""

    def __init__(
        self, tokenizer: Tokenizer, engine: dict[str, Any], options: dict[str, Any], queued: int | None = None
    ) -> None:
        self.core = ScriptedCore(tokenizer)
        config = EngineArgs(**{"model": "demo", "generation_config": "vllm"} | engine).resolve()
        skips = config.args.skip_tokenizer_init
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(async_inputs, "RenderLane", KeptLane)
            self.llm = AsyncLLM(
                config,
                self.core,
                Ready(MAX_LEN, 64, 32),
                None if skips else tokenizer,
                AsyncOptions(max_num_queued_reqs=queued),
            )
        self.state = ServerState(self.llm, ServerArgs(**options), ["demo", "alias"])
        self.completions = TurnService(self.state, read_completion)
        self.chat = TurnService(self.state, read_chat)
        self.app = build_app(self.state)

    @property
    def request(self) -> NewRequest:
        """The one request that the core was given."""
        assert len(self.core.requests) == 1
        return self.core.requests[0]


@pytest.fixture
def make_server(demo_tokenizer: Tokenizer) -> Iterator[Callable[..., Server]]:
    """Makes a server: `engine` are options of `EngineArgs`, the others of `ServerArgs`; `queued` may wait."""
    made: list[Server] = []

    def make(engine: dict[str, Any] | None = None, queued: int | None = None, **options: Any) -> Server:
        made.append(Server(demo_tokenizer, engine or {}, options, queued))
        return made[-1]

    yield make
    for server in made:
        server.llm.shutdown()


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()


@pytest.fixture
def client(server: Server) -> Iterator[TestClient]:
    with TestClient(server.app) as client:
        yield client


@pytest.fixture(scope="module")
def shared_server(demo_tokenizer: Tokenizer) -> Iterator[Server]:
    """For what a server refuses and has forgotten when the next request comes: making one takes longer than that."""
    server = Server(demo_tokenizer, {}, {})
    yield server
    server.llm.shutdown()


@pytest.fixture(scope="module")
def shared_client(shared_server: Server) -> Iterator[TestClient]:
    with TestClient(shared_server.app) as client:
        yield client


@pytest.fixture
def parsed() -> Callable[[bytes | str], list[dict[str, Any]]]:
    """Takes a stream, which must end with [DONE], to its events."""
    return _parsed


def _parsed(body: bytes | str) -> list[dict[str, Any]]:
    text = body.decode() if isinstance(body, bytes) else body
    events = text.split("\n\n")
    assert all(e.startswith("data: ") for e in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(e.removeprefix("data: ")) for e in events[:-2]]


@pytest.fixture(scope="session")
def openai_schema(shared_data: Path) -> Callable[[str], Any]:
    """Takes a name to the schema of this name in OpenAI's description of its API."""
    yaml = pytest.importorskip("yaml")
    file = shared_data / "openai" / "openapi.yaml"
    if not file.is_file():
        pytest.skip("needs openapi.yaml")
    sections: dict[str, str] = {}  # the whole file is large
    for section in re.finditer(r"^    (\w+):\n((?:      .*\n|\n)+)", file.read_text(), re.MULTILINE):
        sections.setdefault(section[1], section[2])
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    def load(name: str) -> Any:
        return yaml.load(sections[name], Loader=loader)

    return load


@pytest.fixture(scope="session")
def openai_errors(openai_schema: Callable[[str], Any]) -> Callable[[str, Any], list[str]]:
    """What is wrong with a value by the schema of this name."""
    jsonschema = pytest.importorskip("jsonschema")

    @cache
    def validator(name: str) -> Any:
        used: dict[str, Any] = {}
        schema = _plain_schema({"$ref": "#/components/schemas/" + name}, openai_schema, used)
        return jsonschema.Draft202012Validator(schema | {"components": {"schemas": used}})

    return lambda name, value: [f"{e.json_path}: {e.message}" for e in validator(name).iter_errors(value)]


@pytest.fixture(scope="session")
def openai_properties(openai_schema: Callable[[str], Any]) -> Callable[[str], set[str]]:
    """The properties of the schema of this name, with those that it takes over from others."""

    def names(schema: Any) -> set[str]:
        if "$ref" in schema:
            schema = openai_schema(schema["$ref"].rpartition("/")[2])
        return set(schema.get("properties", ())).union(*(names(part) for part in schema.get("allOf", ())))

    return lambda name: names({"$ref": name})


def _plain_schema(schema: Any, load: Callable[[str], Any], used: dict[str, Any]) -> Any:
    """The same in JSON Schema's words (OpenAPI 3.0 has `nullable`); the schemas that it refers to go to `used`."""
    if isinstance(schema, list):
        return [_plain_schema(item, load, used) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(ref := schema.get("$ref"), str) and (name := ref.rpartition("/")[2]) not in used:
        used[name] = {}
        used[name] = _plain_schema(load(name), load, used)
    plain = {key: _plain_schema(value, load, used) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain
