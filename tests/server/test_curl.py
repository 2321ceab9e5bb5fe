"""curl against a real server, as people type it from a README."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import RunningServer

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")

JSON = ["-H", "Content-Type: application/json", "-d"]
PROMPT = {"prompt": "The old house stood", "max_tokens": 8, "temperature": 0}
STREAM: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "stream": True}
KEY = "sk-curl"


def curl(*arguments: str, data: dict[str, object] | None = None, code: int = 0) -> str:
    """What curl prints; `code` is the exit code that it has to have."""
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    sent = [] if data is None else [*JSON, json.dumps(data)]
    result = subprocess.run(
        ["curl", "--no-progress-meter", "--max-time", "30", *arguments, *sent],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    return result.stdout


def test_plain(server: RunningServer) -> None:
    answer = json.loads(curl(f"{server.url}/v1/completions", data=PROMPT))
    assert answer["choices"][0]["text"] == server.complete(**PROMPT)["choices"][0]["text"]
    assert json.loads(curl(f"{server.url}/v1/models"))["data"][0]["id"] == "demo"
    assert curl("-f", f"{server.url}/health") == ""


def test_the_whole_url_as_a_proxy_asks_for_it(server: RunningServer) -> None:
    whole = ["--request-target", f"{server.url}/v1/models?x=/", server.url]
    assert json.loads(curl(*whole))["data"][0]["id"] == "demo"
    assert "Quire" in curl("--request-target", "HTTP://else.where", server.url)


def test_stream(server: RunningServer) -> None:
    output = curl("-N", "-i", f"{server.url}/v1/chat/completions", data={**STREAM, "max_tokens": 8})
    head, _, body = output.partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert "content-type: text/event-stream" in head.lower()
    *events, done, rest = body.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    whole = server.chat(STREAM["messages"], max_tokens=8)
    assert text == whole["choices"][0]["message"]["content"]


def test_stream_left_early(server: RunningServer) -> None:
    # Four seconds' work here, left after a tenth: 8 sequences of these are done in a sixth of a second.
    fields = {**PROMPT, "stream": True, "n": 128, "temperature": 1, "max_tokens": 480, "ignore_eos": True}
    name, timed_out = "vllm:generation_tokens_total", 28
    before = server.metrics()[name]
    curl("-N", "--max-time", "0.1", f"{server.url}/v1/completions", data=fields, code=timed_out)
    server.wait_idle()
    assert server.metrics()[name] - before < 128 * 480


def test_mistakes(server: RunningServer) -> None:
    url = f"{server.url}/v1/completions"
    status = ["-w", "\n%{http_code}"]

    form, code = curl(*status, "-d", json.dumps(PROMPT), url).splitlines()  # curl's own content type
    assert (code, json.loads(form)["error"]["type"]) == ("415", "invalid_request_error")
    assert "Content-Type: application/json" in json.loads(form)["error"]["message"]

    broken, code = curl(*status, *JSON, "{'prompt': 1}", url).splitlines()
    assert (code, "not valid JSON" in json.loads(broken)["error"]["message"]) == ("400", True)

    wrong_method, code = curl(*status, url).splitlines()
    assert (code, json.loads(wrong_method)["error"]["code"]) == ("405", "method_not_allowed")

    wrong_route, code = curl(*status, f"{server.url}/v1/nothing").splitlines()
    assert (code, json.loads(wrong_route)["error"]["code"]) == ("404", "not_found")

    curl("-f", f"{server.url}/v1/models/other", code=22)


def test_body_that_is_sent_in_pieces(server: RunningServer) -> None:
    whole = server.complete(**PROMPT)["choices"]
    url = f"{server.url}/v1/completions"
    for header in ("Transfer-Encoding: chunked", "Expect: 100-continue"):
        assert json.loads(curl("-H", header, url, data=PROMPT))["choices"] == whole


@pytest.mark.slow
def test_keys(server_of: Callable[..., RunningServer]) -> None:
    server = server_of("--api-key", KEY)
    url = f"{server.url}/v1/completions"
    for headers in ([], ["-H", "Authorization: Bearer wrong"], ["-H", f"Authorization: {KEY}"], ["-u", "me:wrong"]):
        answer, code = curl(*headers, "-w", "\n%{http_code}", url, data=PROMPT).splitlines()
        assert (code, json.loads(answer)["error"]["code"]) == ("401", "invalid_api_key")
        assert KEY not in answer
    for headers in (["-H", f"Authorization: Bearer {KEY}"], ["-H", f"x-api-key: {KEY}"], ["-u", f"me:{KEY}"]):
        assert json.loads(curl(*headers, url, data=PROMPT))["choices"]
    assert curl("-f", f"{server.url}/health") == ""
    assert KEY not in server.log()


@pytest.mark.slow
def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "quire", "serve", "demo", "--uds", str(path)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            curl(
                "--retry",
                "60",
                "--retry-all-errors",
                "--retry-delay",
                "1",
                "-f",
                "--unix-socket",
                str(path),
                "http://quire/health",
            )
            assert path.stat().st_mode & 0o077 == 0, "nobody else's"
            answer = json.loads(curl("--unix-socket", str(path), "http://quire/v1/completions", data=PROMPT))
            assert answer["usage"]["completion_tokens"] == 8
        finally:
            server.terminate()
            assert server.wait(15) == 0
    assert not path.exists()
