"""Open WebUI, its server, by its Ollama and its OpenAI connection: lists, chats, tools, schemas, titles, stops, errors.

What its server writes is in server.log, in its environment. What its page does beyond that was looked at by hand.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

OLLAMA, OPENAI = "demo:latest", "demo"  # the names by which the two connections offer the model
USER = [{"role": "user", "content": "Tell me a story."}]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["box", "bag"]}},
    "required": ["place"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
OFF = ("RAG_EMBEDDING_MODEL_AUTO_UPDATE", "ENABLE_VERSION_UPDATE_CHECK", "ENABLE_PERSISTENT_CONFIG", "WEBUI_AUTH")


class OpenWebUI:
    """Its server, signed in to."""

    def __init__(self, url: str) -> None:
        self.url, self.token = url, ""
        self.token = self.ask("/api/v1/auths/signin", {"email": "", "password": ""})["token"]

    def open(self, path: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=60)

    def ask(self, path: str, body: Any = None) -> Any:
        with self.open(path, body) as answer:
            return json.load(answer)

    def refusal(self, path: str, body: Any) -> tuple[int, str]:
        error = harness.raised(urllib.error.HTTPError, lambda: self.open(path, body))
        assert isinstance(error, urllib.error.HTTPError)
        return error.code, error.read().decode()


@contextlib.contextmanager
def open_webui(quire: str) -> Iterator[OpenWebUI]:
    """Its server beside Quire's, both of its connections leading there."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        home = os.path.join(home, "home")
        os.mkdir(home)  # it imports what lies in the directory above
        own = {"OLLAMA_BASE_URL": quire, "OPENAI_API_BASE_URL": f"{quire}/v1", "OPENAI_API_KEY": "none"}
        own |= {"DATA_DIR": home, "HOME": home, "HF_HUB_OFFLINE": "1", "OFFLINE_MODE": "1", "DO_NOT_TRACK": "1"}
        own |= {"RAG_EMBEDDING_ENGINE": "ollama", "WEBUI_SECRET_KEY": 8 * "quire", **dict.fromkeys(OFF, "False")}
        command = [Path(sys.executable).with_name("open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
        environment, log = {**os.environ, **own}, (Path(sys.prefix) / "server.log").open("wb")
        with log, subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log) as server:
            try:
                url, end = f"http://127.0.0.1:{port}", time.monotonic() + 200
                while True:
                    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                        break
                    assert server.poll() is None, f"see {log.name}"
                    assert time.monotonic() < end, f"see {log.name}"
                    time.sleep(0.2)
                yield OpenWebUI(url)
            finally:
                server.terminate()


CONTEXT = contextlib.ExitStack()
QUIRE = CONTEXT.enter_context(harness.serving(*harness.LONG, "--tool-call-parser", "hermes"))
UI = CONTEXT.enter_context(open_webui(QUIRE))


def chat(model: str, **fields: Any) -> dict[str, Any]:
    """A request to its own route, which has no field for Ollama's temperature but in options."""
    greedy = {"options": {"temperature": 0}} if model == OLLAMA else {"temperature": 0}
    return {"model": model, "messages": USER, "max_tokens": 12, "stream": False, **greedy, **fields}


def pieces(body: dict[str, Any]) -> list[dict[str, Any]]:
    with UI.open("/api/chat/completions", body | {"stream": True}) as answer:
        lines = [line.decode().removeprefix("data: ").strip() for line in answer]
    *events, done = filter(None, lines)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def lists() -> None:
    models = {model["id"]: model["owned_by"] for model in UI.ask("/api/models")["data"]}
    assert (models[OLLAMA], OPENAI in models) == ("ollama", True), models
    (model,) = UI.ask("/ollama/api/tags")["models"]
    assert (model["model"], model["details"]["family"]) == (OLLAMA, "llama")
    assert UI.ask("/ollama/api/version")["version"]
    assert OLLAMA in json.dumps(UI.ask("/ollama/api/ps"))
    assert UI.ask("/ollama/api/show", {"model": OLLAMA})["model_info"]["llama.context_length"] == 16384


def chats() -> None:
    texts = set()
    for model in (OLLAMA, OPENAI):
        whole = UI.ask("/api/chat/completions", chat(model))
        streamed = pieces(chat(model))
        choices = [choice for piece in streamed for choice in piece["choices"]]
        joined = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert len(streamed) > 1
        assert joined == whole["choices"][0]["message"]["content"]
        assert whole["usage"]["completion_tokens"] == 12
        texts.add(joined)
    with UI.open(
        "/ollama/api/chat", {"model": OLLAMA, "messages": USER, "options": {"temperature": 0, "num_predict": 12}}
    ) as answer:
        own = [json.loads(line) for line in answer]
    texts.add("".join(piece["message"]["content"] for piece in own))
    assert (len(texts), own[-1]["done_reason"]) == (1, "length"), texts


def schemas() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sighting", "schema": SCHEMA}}
    for model in (OLLAMA, OPENAI):
        answer = UI.ask("/api/chat/completions", chat(model, max_tokens=60, response_format=form))
        assert json.loads(answer["choices"][0]["message"]["content"])["place"] in ("box", "bag")


def tools() -> None:
    """Its Ollama connection has no field for a call that is required, and the demo never chooses to call."""
    body = chat(OPENAI, max_tokens=100, tools=[LOOK], tool_choice="required", parallel_tool_calls=False)
    message = UI.ask("/api/chat/completions", body)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"])["place"] in ("box", "bag")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "A cat."}
    for model in (OLLAMA, OPENAI):
        after = UI.ask("/api/chat/completions", chat(model, tools=[LOOK], messages=[*USER, message, result]))
        assert after["choices"][0]["message"]["content"]


def titles() -> None:
    for model in (OLLAMA, OPENAI):
        answer = UI.ask("/api/v1/tasks/title/completions", {"model": model, "messages": USER})
        assert answer["choices"][0]["message"]["content"], answer


def vectors() -> None:
    for model in (OLLAMA, OPENAI):
        answer = UI.ask("/api/embeddings", {"model": model, "input": ["A cat.", "A dog."]})
        assert [len(one["embedding"]) for one in answer["data"]] == [256, 256]


def leaving_ends_the_work() -> None:
    for model in (OLLAMA, OPENAI):
        answer = UI.open("/api/chat/completions", chat(model, max_tokens=10_000, stream=True))
        answer.readline()
        answer.close()
        harness.wait_idle(url=QUIRE)


def errors() -> None:
    beyond = [{"role": "user", "content": "long " * 20_000}]
    for model in (OLLAMA, OPENAI):
        status, said = UI.refusal("/api/chat/completions", chat(model, messages=beyond))
        assert (status, "maximum context length" in said) == (400, True), said


with CONTEXT:
    harness.run(lists, chats, schemas, tools, titles, vectors, leaving_ends_the_work, errors)
