"""A real server in a child process, as the tests of this directory use it: started, asked, watched and stopped.

`conftest` makes fixtures of it. Everything goes through sockets and signals, as it would from another machine.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import wait_until

START_SECONDS = 200.0
STOP_SECONDS = 15.0
IDLE_SECONDS = 10.0
_READY = re.compile(r"Quire is ready on \w+://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Answer:
    """An HTTP response, read to its end."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """The JSON of a stream's events; that [DONE] is the last one is checked, and not part of the list."""
        assert self.headers.get_content_type() == "text/event-stream", self.body
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", ""), self.body[-300:]
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


class RunningServer:
    """`quire serve demo` with some flags, ready. `stop` ends it and checks that it leaves in good order.

    Attributes:
        port: where it listens, on 127.0.0.1.
        process: the child; it leads a session of its own, so that all of its descendants can be found.
    """

    def __init__(self, log: Path, *flags: str, model: str = "demo", env: dict[str, str] | None = None) -> None:
        self.log_path = log
        self.api_key = flags[flags.index("--api-key") + 1] if "--api-key" in flags else None
        command = [sys.executable, "-m", "quire", "serve", model, "--host", "127.0.0.1", "--port", "0", *flags]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **(env or {})}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        try:
            self.port = self._wait_ready()
        except BaseException:
            self.kill()
            raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        """All that it has written to standard output and standard error."""
        return self.log_path.read_text(errors="replace")

    def _wait_ready(self) -> int:
        wait_until(lambda: _READY.search(self.log()) or self.process.poll() is not None, START_SECONDS)
        ready = _READY.search(self.log())
        assert ready is not None, f"the server did not start:\n{self.log()}"
        self.port = int(ready[1])
        assert self.get("/health").status == 200
        return self.port

    # Requests, each on a connection of its own.

    def connect(self, timeout: float = 30.0) -> socket.socket:
        """A fresh TCP connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60.0,
    ) -> Answer:
        """Ask with exactly these headers (and the key, where the server has one and the headers don't)."""
        headers = dict(headers or {})
        if self.api_key is not None and "Authorization" not in headers:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, fields: Any, **headers: str) -> Answer:
        """Send JSON."""
        return self.request("POST", path, json.dumps(fields).encode(), {"Content-Type": "application/json", **headers})

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """The answer of /v1/completions, which has to be 200; greedy unless `fields` say otherwise."""
        return _checked(self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})).json()

    def chat(self, messages: Any, **fields: Any) -> Any:
        """The answer of /v1/chat/completions, likewise; one user's message may be given as a text."""
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return _checked(self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})).json()

    def stream(self, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a streamed answer, which has to be 200."""
        return _checked(self.post(path, {"temperature": 0, "stream": True, **fields})).events()

    def golden(self) -> tuple[Any, Any]:
        """Tokens and logprobs of one request, which nothing else may ever change."""
        choice = self.complete("The old house stood", max_tokens=12, logprobs=3, return_token_ids=True)["choices"][0]
        return choice["token_ids"], choice["logprobs"]

    # The state of the engine, as /metrics tells it.

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name; those that differ in other labels than model_name and engine are added up."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(_checked(self.get("/metrics")).body.decode()):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def is_idle(self) -> bool:
        """Whether no sequence runs or waits and all KV blocks are free."""
        metrics = self.metrics()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return not any(metrics[name] for name in names)

    def wait_idle(self, seconds: float = IDLE_SECONDS) -> None:
        wait_until(self.is_idle, seconds, "the engine did not become idle")

    # The process.

    def processes(self) -> list[int]:
        """The server and all of its descendants that are alive."""
        return list(live_processes(self.process.pid))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """Wait for the engine to be idle, end the server by SIGTERM, and check that it leaves nothing behind."""
        try:
            self.wait_idle()
            self.signal(signal.SIGTERM)
            code = self.process.wait(STOP_SECONDS)
            wait_until(lambda: not self.processes(), 10.0, "the server left processes behind")
            assert code == 0, f"exit code {code}:\n{self.log()}"
            assert "Traceback" not in self.log(), self.log()
        finally:
            self.kill()

    def kill(self) -> None:
        """End what is left of it, unconditionally."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _checked(answer: Answer) -> Answer:
    assert answer.status == 200, (answer.status, answer.body)
    return answer


def command_line(pid: int) -> bytes:
    """How it was started; empty for one that ended meanwhile, as short-lived helpers of a server do."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def live_processes(leader: int) -> Iterator[int]:
    """The live processes of a session; zombies are not alive."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state != "Z":
                    yield int(entry.name)
