"""Continue's command line (`cn -p`) by its Ollama and its OpenAI provider: text, a tool and its result, errors.

Its Ollama provider asks /v1/chat/completions, too. It always brings tools, so the server needs a format of calls, and
its instructions take more than the demo's context.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import harness
import node

FLAGS = [*harness.LONG, "--tool-call-parser", "hermes"]
FILE = "story.txt"
NODE = node.install("continue")


def cn(provider: str, url: str, limit: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What it says to a prompt, where its model is this server's."""
    bounds = {"contextLength": 16384, "maxTokens": limit, "temperature": 0}  # its own: 200,000 and 64,000
    model = {"name": "demo", "provider": provider, "model": "demo", "apiBase": url, "apiKey": "none"}
    config = {"name": "quire", "version": "1.0.0", "schema": "v1"}
    config["models"] = [model | {"roles": ["chat"], "defaultCompletionOptions": bounds}]  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "config.yaml").write_text(json.dumps(config))
        (Path(home) / FILE).write_text("A cat slept in a box.")
        own = {"HOME": home, "CONTINUE_GLOBAL_DIR": home, "CONTINUE_CLI_ENABLE_TELEMETRY": "0"}
        command = [NODE, node.DIRECTORY / "node_modules/@continuedev/cli/dist/cn.js", "--config", "config.yaml"]
        return subprocess.run(
            [*command, "-p", "Tell me a story.", *arguments],
            cwd=home,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )


def text() -> None:
    with harness.serving(*FLAGS) as url:
        said = {provider: cn(provider, base, 40) for provider, base in (("ollama", url), ("openai", f"{url}/v1"))}
        written = harness.metric("vllm:generation_tokens_total", url)
    for one in said.values():
        assert (one.returncode, bool(one.stdout.strip())) == (0, True), one
    assert said["ollama"].stdout == said["openai"].stdout
    assert written == 80


@contextlib.contextmanager
def calling(url: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A way to the server that has the first answer read the file, as the demo would never choose to.

    Yields its URL, and the bodies of the requests that came this way.
    """
    bodies: list[dict[str, Any]] = []

    class Way(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(json.loads(json.dumps(body)))
            for tool in body["tools"]:
                if tool["function"]["name"] == "Read":
                    own = {"properties": {"filepath": {"const": FILE}}, "additionalProperties": False}
                    tool["function"]["parameters"] |= own
            chosen = {"type": "function", "function": {"name": "Read"}}
            body["tool_choice"] = "none" if body["messages"][-1]["role"] == "tool" else chosen
            asked = urllib.request.Request(
                url + self.path, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked) as answer:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["content-type"])
                self.end_headers()
                self.wfile.write(answer.read())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    way = ThreadingHTTPServer(("127.0.0.1", 0), Way)
    threading.Thread(target=way.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{way.server_port}", bodies
    finally:
        way.shutdown()
        way.server_close()


def a_tool_and_its_result() -> None:
    for provider, path in (("ollama", ""), ("openai", "/v1")):
        with harness.serving(*FLAGS) as url, calling(url) as (way, bodies):
            said = cn(provider, way + path, 100)
        assert (said.returncode, len(bodies)) == (0, 2), (said, bodies)
        *_, message, result = bodies[1]["messages"]
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("Read", {"filepath": FILE})
        assert (result["role"], result["tool_call_id"]) == ("tool", call["id"])
        assert "A cat slept in a box." in result["content"]


def refusals() -> None:
    said = cn("openai", f"{harness.URL}/v1", 40)
    assert (said.returncode, "--tool-call-parser" in said.stderr) == (1, True), said
    with harness.serving("--tool-call-parser", "hermes") as url:
        said = cn("openai", f"{url}/v1", 40)
    assert (said.returncode, "maximum context length" in said.stderr) == (1, True), said
    with harness.serving(*FLAGS) as url:
        said = cn("openai", f"{url}/v1", 64_000)
    assert (said.returncode, "max_tokens" in said.stderr) == (1, True), said


harness.run(text, a_tool_and_its_result, refusals)
