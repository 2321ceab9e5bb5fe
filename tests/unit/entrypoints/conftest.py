"""A fake `LLM` and a fake server in the place of the real ones, for tests of the command line: no model, no torch."""

import argparse
import io
import json
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import quire
from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli import main as command
from quire.entrypoints.cli.parser import Parser
from quire.errors import InvalidRequestError
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams


@pytest.fixture(scope="session", autouse=True)
def _one_parser() -> Iterator[None]:
    """The flags of the command line are made once, and not for each command: most tests take less time than that."""
    kept = command.build_parser()

    def as_built() -> Parser:
        _forget_file(kept)
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "build_parser", as_built)
        yield


def _forget_file(parser: argparse.ArgumentParser) -> None:
    if isinstance(parser, Parser):
        parser.source = ""
    for action in parser._actions:
        for each in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            _forget_file(each)


class FakeTokenizer:
    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> list[int]:
        """One "token" a character, so that a test reads the whole conversation out of the prompt."""
        assert kwargs == {"add_generation_prompt": True, "tokenize": True}
        return [ord(c) for c in "|".join(f"{m['role']}:{m['content']}" for m in messages)]


class FakeEngine:
    """Answers every request with the words of `answer`, one a step."""

    def __init__(self, refuse: Callable[[Any], bool], on_step: Callable[[], None]) -> None:
        self.refuse = refuse
        self.on_step = on_step
        self.answer = ["Once ", "more ", "é."]
        self.requests: list[tuple[Any, SamplingParams]] = []
        self.running: dict[str, list[str]] = {}
        self.aborted: list[str] = []
        self.executor = types.SimpleNamespace(report=types.SimpleNamespace(kernels="avx512", num_threads=2))

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        if self.refuse(prompt):
            raise InvalidRequestError("prompt is refused.", "prompt")
        self.requests.append((prompt, params))
        self.running[request_id] = list(self.answer)

    def step(self) -> list[RequestOutput]:
        self.on_step()
        outputs: list[RequestOutput] = []
        for request_id, words in list(self.running.items()):
            text, finished = words.pop(0), not words
            outputs.append(
                RequestOutput(request_id, None, [1, 2], outputs=[CompletionOutput(0, text, [7])], finished=finished)
            )
            if finished:
                del self.running[request_id]
        return outputs

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def discard_outputs(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self.running[request_id]


class FakeLLM:
    """Keeps what it is asked; a test changes the class attributes to make it fail or interrupt."""

    made: list["FakeLLM"]
    failure: BaseException | None = None
    defaults: dict[str, Any]
    refuse = staticmethod(lambda prompt: False)
    on_step = staticmethod(lambda: None)

    def __init__(self, **options: Any) -> None:
        if type(self).failure is not None:
            raise type(self).failure
        self.args = EngineArgs(**options)
        self.llm_engine = FakeEngine(type(self).refuse, type(self).on_step)
        self.model_config = types.SimpleNamespace(vocab_size=50, seed=self.args.seed)
        self.calls: list[tuple[list[Any], Any]] = []
        type(self).made.append(self)

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**type(self).defaults)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool = True) -> list[RequestOutput]:
        self.calls.append((prompts, params))
        many = params if isinstance(params, list) else [params] * len(prompts)
        return [
            RequestOutput(
                str(i),
                prompt if isinstance(prompt, str) else None,
                [1, 2, 3],
                outputs=[CompletionOutput(j, f"text {i}.{j}", [5] * (p.max_tokens or 1)) for j in range(p.n)],
                finished=True,
            )
            for i, (prompt, p) in enumerate(zip(prompts, many, strict=True))
        ]


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """`quire.LLM` and its home are a fresh FakeLLM class, even where an earlier test has loaded the real one."""
    fresh = type("FreshFakeLLM", (FakeLLM,), {"made": [], "failure": None, "defaults": {}})
    module = types.ModuleType("quire.entrypoints.llm")
    module.LLM = fresh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quire.entrypoints.llm", module)
    monkeypatch.setitem(vars(quire), "LLM", fresh)  # the public name keeps what it was loaded with
    return fresh


@pytest.fixture
def give_input(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a text the standard input, as if piped in."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


class FakeServer(ThreadingHTTPServer):
    """An OpenAI-like server; what a test does not set in `answers` streams the words of `answer`, one a chunk."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.answer = ["Once ", "more ", "é."]
        self.answers: dict[str, Callable[[_Handler, Any], None]] = {}  # path -> answers the request of this body
        self.requests: list[tuple[str, dict[str, str], Any]] = []  # path, headers, body
        self.num_connections = 0
        self.broken = threading.Event()  # a client went away while it was answered

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.broken.set()

    def bodies(self, path: str) -> list[Any]:
        return [body for of_path, _, body in self.requests if of_path == path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.server.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        if (answer := self.server.answers.get(self.path)) is not None:
            answer(self, body)
        elif self.path == "/v1/models":
            self.send_json(200, {"data": [{"id": "first", "max_model_len": 512}, {"id": "second"}]})
        elif body is None:
            self.send_json(404, {"error": {"message": "no such route", "type": "invalid_request_error"}})
        else:
            self.stream(self.server.answer, chat="messages" in body)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send_json(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self, words: Iterable[str], *, chat: bool, usage: bool = True) -> None:
        self.start_stream()
        for number, word in enumerate(words):
            last = number == len(self.server.answer) - 1
            part = {"delta": {"content": word}} if chat else {"text": word}
            self.send_event({"choices": [{**part, "index": 0, "finish_reason": "stop" if last else None}]})
        if usage:
            self.send_event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": number + 1}})
        self.send_chunk(b"data: [DONE]\n\n")
        self.send_chunk(b"")

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_event(self, value: Any) -> None:
        self.send_chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def send_chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A running FakeServer."""
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield fake
        fake.shutdown()
