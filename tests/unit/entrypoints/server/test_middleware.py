"""API keys, limits, ids, counting, and errors that nobody caught."""

import asyncio
import base64
import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient

from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.middleware import OUTLET, Frame, outlet_of
from quire.entrypoints.server.prometheus import HttpCounts

Maker = Callable[..., TestClient]


# ---- keys


def basic(key: str, name: str = "") -> str:
    return "Basic " + base64.b64encode(f"{name}:{key}".encode()).decode()


def all_paths(app: FastAPI) -> set[str]:
    return {context.path for context in iter_route_contexts(app.routes) if context.path is not None}


def statuses(app: FastAPI, paths: Iterable[str], headers: list[tuple[bytes, bytes]]) -> dict[tuple[str, str], int]:
    """The status of each path as it is, which an HTTP client might put in order, by method."""
    found: dict[tuple[str, str], int] = {}

    async def ask(method: str, path: str) -> None:
        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            found.setdefault((method, path), message.get("status"))

        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
        await app(scope, receive, send)

    async def ask_all() -> None:
        for path in paths:
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"):
                await ask(method, path)

    asyncio.run(ask_all())
    return found


OPEN = {"/health", "/ping", "/load", "/metrics", "/version"}


def test_every_route_wants_a_key_but_for_those_that_watch_a_server(make_state: Callable[..., Any]) -> None:
    app = build_app(make_state(api_key=["sesame"]))
    paths = all_paths(app)
    assert {"/v1/models", "/docs", "/openapi.json", "/metrics", "/live", "/", "/health"} <= paths
    paths |= {"", "/nowhere", "/ping/x", "//health", "/v1/../health", "/health?", "/HEALTH", "health"}
    paths |= {"/health//", "/v1/metrics/", "/metrics/x", "/metrics/v1/models", "/v1/models/", "/live/"}
    with_slash = {path + "/" for path in OPEN}  # as some are configured, of vLLM's too
    wrong = [(b"authorization", b"Bearer wrong"), (b"host", b"x/health"), (b"x-forwarded-prefix", b"/health")]
    for (method, path), status in statuses(app, paths | with_slash, wrong).items():
        assert (status == 401) is (path not in OPEN | with_slash), (method, path)


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({"Authorization": "Bearer sesame"}, True),
        ({"Authorization": "bearer  second "}, True),
        ({"x-api-key": "sesame"}, True),
        ({"Authorization": basic("sesame")}, True),
        ({"Authorization": basic("sesame", "me")}, True),
        ({"Authorization": "Bearer wrong", "x-api-key": "second"}, True),
        ({}, False),
        ({"Authorization": "sesame"}, False),
        ({"Authorization": "Bearer"}, False),
        ({"Authorization": "Bearer sesam"}, False),
        ({"Authorization": "Bearer sesame second"}, False),
        ({"Authorization": "Basic !"}, False),
        ({"Authorization": basic("", "sesame")}, False),
        ({"x-api-key": ""}, False),
    ],
)
def test_keys(make_client: Maker, headers: dict[str, str], passes: bool) -> None:
    answer = make_client(api_key=["sesame", "second"]).get("/v1/models", headers=headers)
    assert answer.status_code == (200 if passes else 401)
    if not passes:
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_browser_is_asked_for_the_key(make_client: Maker) -> None:
    client = make_client(api_key=["sesame"])
    assert client.get("/").headers["www-authenticate"] == 'Basic realm="Quire"'
    assert client.get("/", headers={"Authorization": basic("sesame")}).status_code == 200


def test_health_needs_no_key_below_a_root_path_either(make_client: Maker) -> None:
    client = make_client(api_key=["sesame"], root_path="/llm")
    found = {path: client.get(path).status_code for path in ("/health", "/llm/health", "/llm/llm/health", "/llmhealth")}
    assert found == {"/health": 200, "/llm/health": 200, "/llm/llm/health": 401, "/llmhealth": 401}
    for path in ("/v1/models", "/llm/v1/models"):
        assert client.get(path, headers={"x-api-key": "sesame"}).status_code == 200


# ---- cross-origin requests


PREFLIGHT = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}


def test_a_preflight_needs_no_key(make_client: Maker) -> None:
    client = make_client(api_key=["sesame"], allowed_origins=["*"])
    allowed = client.options("/v1/models", headers=PREFLIGHT)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "*")
    refused = client.get("/v1/models", headers={"Origin": "http://elsewhere"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")


def test_origins_can_be_limited(make_client: Maker) -> None:
    client = make_client(allowed_origins=["http://here"])
    assert client.options("/v1/models", headers=PREFLIGHT).status_code == 400
    assert "access-control-allow-origin" not in client.get("/version", headers={"Origin": "http://x"}).headers


def test_other_origins_are_closed_out_by_default(client: TestClient) -> None:
    """Or any web page could read what a local model answers."""
    assert client.options("/v1/models", headers=PREFLIGHT).status_code == 405
    answer = client.get("/v1/models", headers={"Origin": "http://elsewhere"})
    assert not any(name.startswith("access-control") for name in answer.headers)


# ---- limits


def test_large_bodies(make_client: Maker) -> None:
    client = make_client(max_body_bytes=1000)
    headers = {"Content-Type": "application/json"}

    def chunks() -> Any:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 100
        yield b'"}'

    for content in (b"x" * 1001, chunks()):
        answer = client.post("/tokenize", content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert client.post("/tokenize", content=b'{"prompt": "x"}'.ljust(1000), headers=headers).status_code == 200


def test_an_announced_length_is_refused_before_a_byte_is_read(make_state: Callable[..., Any]) -> None:
    async def receive() -> Any:
        raise AssertionError("read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/tokenize", "query_string": b"",
        "headers": [(b"content-length", b"99999999999")],
    }  # fmt: skip
    asyncio.run(build_app(make_state())(scope, receive, send))
    assert sent[0]["status"] == 413


def test_many_headers(make_client: Maker) -> None:
    client = make_client(h11_max_header_count=20)
    assert client.get("/version", headers={f"x-{i}": "y" for i in range(10)}).status_code == 200
    answer = client.get("/version", headers={f"x-{i}": "y" for i in range(21)})
    assert (answer.status_code, answer.json()["error"]["type"]) == (431, "invalid_request_error")


# ---- ids, counts and errors


def test_request_ids(make_client: Maker, client: TestClient) -> None:
    assert "x-request-id" not in client.get("/version", headers={"X-Request-Id": "mine"}).headers
    client = make_client(enable_request_id_headers=True)
    assert client.get("/version", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    new = [client.get("/nowhere", headers={"X-Request-Id": given}).headers["x-request-id"] for given in ("", "x" * 999)]
    assert [len(text) for text in new] == [32, 32]
    assert len(set(new)) == 2


@pytest.mark.parametrize("middleware", [[], ["a.users.own"]])
def test_nothing_goes_past_a_middleware_of_the_users(make_state: Callable[..., Any], middleware: list[str]) -> None:
    """It may want to see all that is sent, so streams lose their shortcut."""
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(outlet_of(scope))

    async def nothing(*_: Any) -> Any: ...

    outlet = object()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], OUTLET: outlet}
    asyncio.run(Frame(app, make_state(middleware=middleware), HttpCounts())(scope, nothing, nothing))
    assert found == [None if middleware else outlet]


def break_a_route(app: FastAPI) -> None:
    @app.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError("/home/secret")


def test_an_uncaught_exception(make_state: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    state = make_state(allowed_origins=["*"])
    app = build_app(state)
    break_a_route(app)
    with caplog.at_level(logging.ERROR, "quire"):
        answer = TestClient(app).get("/broken", headers={"Origin": "http://elsewhere"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer.text
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "GET /broken failed" in caplog.text
    assert "ZeroDivisionError: /home/secret" in caplog.text
    assert state.num_in_flight == 0


def test_the_live_view_is_no_load(make_state: Callable[..., Any]) -> None:
    """Its streams last as long as the page is open, and nobody should wait for them at the end."""
    state = make_state()
    seen: list[int] = []

    async def send(message: Any) -> None:
        seen.append(state.num_in_flight)
        raise ConnectionError

    async def receive() -> Any:
        await asyncio.sleep(3600)

    scope = {"type": "http", "method": "GET", "path": "/live", "query_string": b"", "headers": []}
    with pytest.raises(BaseException):  # noqa: B017, PT011
        asyncio.run(build_app(state)(scope, receive, send))
    assert seen[0] == 0


@pytest.mark.parametrize(("options", "count"), [({"log_level": "debug"}, 1), ({}, 0)])
def test_a_line_for_each_request(
    make_client: Maker, options: dict[str, Any], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "quire"):
        make_client(**options).get("/nowhere?key=secret")
    lines = [record.getMessage() for record in caplog.records if "/nowhere" in record.getMessage()]
    assert len(lines) == count
    assert all(line.startswith("GET /nowhere from testclient: 404 in 0.") for line in lines)


def test_requests_are_counted_by_route(make_client: Maker) -> None:
    client = make_client()
    client.post("/v1/completions", json={"prompt": "Hi"})
    client.post("/completions", content="{", headers={"Content-Type": "application/json"})  # of the same route
    client.get("/v1/models/demo")
    client.head("/v1/models/other")
    client.get("/nowhere")
    for path in ("/metrics", "/health", "/ping", "/load", "/version"):
        client.get(path)
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("http_requests_total")]
    assert sorted(lines) == [
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0',
        'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0',
        'http_requests_total{handler="/v1/models/{model:path}",method="GET",status="2xx"} 1.0',
        'http_requests_total{handler="/v1/models/{model:path}",method="HEAD",status="4xx"} 1.0',
        'http_requests_total{handler="none",method="GET",status="4xx"} 1.0',
    ]


def test_paths_without_lines_in_the_log(make_client: Maker, caplog: pytest.LogCaptureFixture) -> None:
    client = make_client(log_level="debug", disable_access_log_for_endpoints="/health,/metrics")
    with caplog.at_level(logging.DEBUG, "quire"):
        for path in ("/health", "/version"):
            client.get(path)
    lines = [message for message in caplog.messages if "from testclient" in message]
    assert [line.split()[1] for line in lines] == ["/version"]
