"""The application as a whole: bad bodies, unknown routes, and what its OpenAPI description says."""

import gzip
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.routing import APIRoute, iter_route_contexts
from fastapi.testclient import TestClient

import quire
from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.body import JsonRoute, decode_object
from quire.errors import InvalidRequestError

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object; it is a list"),
        (b"3", "must be a JSON object; it is a number"),
        (b"null", "must be a JSON object; it is null"),
        (b'"x"', "must be a JSON object; it is a string"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt":' * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b'{"\xff": 1}', "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid JSON: half of a surrogate pair stands alone."),
        (b'{"prompt": "\\ud800"} \n', "not valid JSON: half of a surrogate pair stands alone."),
        (b'{"prompt": "\\ud800\\udc0', "not valid JSON: Input data was truncated."),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b'{"prompt": -Infinity}', "not valid JSON"),
        (b'{"prompt": 1e999}', "not valid JSON"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": "x"} x', "not valid JSON"),
    ],
)
def test_bad_bodies(client: TestClient, body: bytes, message: str) -> None:
    answer = client.post("/tokenize", content=body, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]


def test_whole_numbers_are_integers_however_they_are_written(client: TestClient) -> None:
    asked = {"prompt": "x"}
    for field, whole, broken in (("max_tokens", "2.0", "2.5"), ("n", "1e0", "1.5"), ("top_k", "-1.0", "-0.5")):
        texts = [json.dumps(asked)[:-1] + f', "{field}": {number}' + "}" for number in (whole, broken)]
        taken, refused = (client.post("/v1/completions", content=text, headers=JSON) for text in texts)
        assert (taken.status_code, refused.status_code, refused.json()["error"]["param"]) == (200, 400, field)
    assert decode_object(b'{"a": 1.0, "b": [1.0], "c": true, "d": 0.5}') == {"a": 1, "b": [1.0], "c": True, "d": 0.5}
    assert type(decode_object(b'{"a": 1.0}')["a"]) is int
    huge = json.dumps(asked | {"max_tokens": 1e300})
    error = client.post("/v1/completions", content=huge, headers=JSON).json()["error"]
    assert (error["param"], len(error["message"]) < 300) == ("max_tokens", True)


def test_numbers_that_take_long_to_read_are_no_trap() -> None:
    """msgspec by itself takes 30 us for each 1e308: 16 MiB of them would hold up all others for more than a minute."""
    assert decode_object(b'{"a": [1e308, -0.5, 1e-320], "b": 1E5}') == {"a": [1e308, -0.5, 1e-320], "b": 100000}
    start = time.process_time()
    with pytest.raises(InvalidRequestError, match="more than 100000 numbers are no integers"):
        decode_object(b'{"a": [' + b"1e308," * 1_000_000 + b"1]}")
    assert time.process_time() - start < 3.0
    assert len(decode_object(b'{"a": [' + b"1," * 200_000 + b"1]}")["a"]) == 200_001
    for broken in (b'{"a": 1.}', b'{"a": NaN}', b'{"a": .5}', b'{"a": 0x1}'):
        with pytest.raises(InvalidRequestError, match="not valid JSON"):
            decode_object(broken)


def test_millions_of_lists_are_refused_unread() -> None:
    """They would hold up all others for a second, and take 400 MB: msgspec lets no other thread run."""
    for item in (b"[],", b"{},", b'["x",[]],'):
        body = b'{"prompt": "x", "user": [' + item * (10_000_000 // len(item)) + b"1]}"
        with pytest.raises(InvalidRequestError, match="more than 1000000 brackets and braces"):
            decode_object(body)
    assert len(decode_object(b'{"a": [' + b"[]," * 900_000 + b"1]}")["a"]) == 900_001


def test_what_a_body_holds_is_counted_before_any_of_it_is_made() -> None:
    """No other thread runs while msgspec makes it: a million names take half a second, 8 million numbers an eighth."""
    texts = [(b'{"a": [' + b'"",' * count + b"1]}", f"{count} texts") for count in (100_000, 199_999, 200_000)]
    names = b'{"a": {' + b",".join(b'"%d": 1' % place for place in range(200_000)) + b"}}"
    with pytest.raises(InvalidRequestError, match="more than 200000 names and texts"):
        decode_object(texts[-1][0])
    with pytest.raises(InvalidRequestError, match="more than 200000 names and texts"):
        decode_object(names)
    for body, _ in texts[:-1]:
        assert decode_object(body)["a"][-1] == 1
    with pytest.raises(InvalidRequestError, match="more than 3000000 values"):
        decode_object(b'{"a": [' + b"1," * 3_000_001 + b"1]}")
    assert len(decode_object(b'{"a": [' + b"1," * 2_999_999 + b"1]}")["a"]) == 3_000_000


def test_what_stands_in_a_text_is_not_counted() -> None:
    for part in ('"', "\\", '\\"', ",", "\\,", '",', '\\",\\\\'):
        text = part * 3_500_000
        assert decode_object(json.dumps({"a": text, "b": [1]}).encode()) == {"a": text, "b": [1]}
    hidden = b'{"a": [' + b'"\\\\",' * 200_000 + b"1]}"  # texts that end in backslashes
    with pytest.raises(InvalidRequestError, match="more than 200000 names and texts"):
        decode_object(hidden)


def test_a_million_names_are_refused_before_they_are_looked_at() -> None:
    with pytest.raises(InvalidRequestError, match="more than 10000 names"):
        decode_object(json.dumps(dict.fromkeys(map(str, range(10_001)))).encode())
    assert len(decode_object(json.dumps(dict.fromkeys(map(str, range(10_000)))).encode())) == 10_000


def test_a_byte_order_mark_is_no_part_of_a_body(client: TestClient) -> None:
    """`curl -d @body.json` sends what an editor wrote; json.loads, by which vLLM reads it, takes it."""
    assert client.post("/tokenize", content=b'\xef\xbb\xbf{"prompt": "x"}', headers=JSON).status_code == 200


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", "a/b; c"]
)
def test_other_content_types(client: TestClient, kind: str) -> None:
    answer = client.post("/tokenize", content=b'{"prompt": "x"}', headers={"Content-Type": kind} if kind else {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_a_compressed_body_is_called_so(client: TestClient) -> None:
    body, headers = gzip.compress(b'{"prompt": "x"}'), JSON | {"Content-Encoding": "gzip"}
    answer = client.post("/tokenize", content=body, headers=headers)
    assert (answer.status_code, "Content-Encoding" in answer.json()["error"]["message"]) == (415, True)


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_content_types(client: TestClient, kind: str) -> None:
    assert client.post("/tokenize", content=b'{"prompt": "x"}', headers={"Content-Type": kind}).status_code == 200


def test_every_body_is_read_by_our_route(client: TestClient) -> None:
    routes = [c.original_route for c in iter_route_contexts(client.app.routes)]  # type: ignore[attr-defined]
    with_body = [r for r in routes if isinstance(r, APIRoute) and r.body_field is not None]
    assert {r.path for r in with_body} >= {"/tokenize", "/detokenize"}
    assert [r.path for r in with_body if not isinstance(r, JsonRoute)] == []


def test_unknown_routes_and_methods(client: TestClient) -> None:
    for path in ("/nowhere", "/v1", "/v1/models/no/such/", "/healthy/"):
        answer = client.get(path)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["code"] in ("not_found", "model_not_found")
    answer = client.delete("/tokenize")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_head(client: TestClient, async_llm) -> None:
    for path in ("/", "/health", "/v1/models", "/metrics", "/docs", "/openapi.json"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
        assert answer.headers["content-type" if path != "/health" else "content-length"]
    assert client.head("/nowhere").status_code == 404
    assert client.head("/tokenize").status_code == 405
    assert client.head("/live").status_code == 405, "an endless answer has no head to wait for"
    described = client.get("/openapi.json").json()["paths"]
    assert not any("head" in item for item in described.values())


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/completions", "/v1/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/completions/", "/v1/completions"),
        ("//v1/completions", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_a_base_url_without_v1_or_with_two_or_more_slashes_is_understood(
    client: TestClient, path: str, meant: str
) -> None:
    right, answer = (client.post(f"http://testserver{each}", json={"prompt": 1.5}) for each in (meant, path))
    assert right.status_code == 400, "the body is at fault, and the route is there"
    assert (answer.status_code, answer.json()) == (400, right.json())
    get = client.get("http://testserver//models/demo/")
    assert (get.status_code, get.json()["id"]) == (200, "demo")


def test_another_wrong_base_url_is_told_the_route(client: TestClient) -> None:
    answer = client.post("/api/v1/completions", json={})
    assert answer.status_code == 404
    assert (
        answer.json()["error"]["message"]
        == "there is no such route; did you mean /v1/completions? /docs lists those there are."
    )
    assert "did you mean" not in client.post("/nowhere/at/all").text


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/modelss", "/v1/models"),
        ("/v1/completion-s", "/v1/completions"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/api/chatt", "/api/chat"),
        ("/helth", "/health"),
    ],
)
def test_a_misspelt_route_is_told_the_right_one(client: TestClient, path: str, meant: str) -> None:
    answer = client.post(path, json={})
    assert (answer.status_code, f"did you mean {meant}?" in answer.text) == (404, True), answer.text
    assert "did you mean" not in client.post(path + "x" * 5000, json={}).text


def test_a_path_of_many_parts_is_refused_at_once(client: TestClient) -> None:
    start = time.perf_counter()
    assert client.get("/a" * 30_000).status_code == 404
    assert "did you mean /v1/completions?" in client.get("/a" * 30_000 + "/v1/completions").text
    assert time.perf_counter() - start < 2.0, "it took seconds, for all others, too"


def test_routes_of_what_models_here_do_not_do_say_so(client: TestClient) -> None:
    for path in ("/generative_scoring", "/v1/generative_scoring"):
        answer = client.post(path, json={"query": "x"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "not_found")
        assert "/score and /rerank score texts" in error["message"]
    answer = client.post("/v1/audio/transcriptions", files={"file": b"x"})
    assert (answer.status_code, "text only" in answer.text) == (404, True)


@pytest.mark.parametrize(
    "path",
    ["/start_profile", "/reset_mm_cache", "/collective_rpc", "/abort_requests", "/inference/v1/generate", "/v1/files"],
)
def test_vllms_other_routes_say_what_to_do_instead(client: TestClient, path: str) -> None:
    answer = client.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["message"][: len(path) + 8]) == (404, f"{path} is not ")


def test_unknown_model(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"model": "gpt", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert answer.json()["error"]["message"] == "the model 'gpt' does not exist; this server has 'demo'."


def test_a_dead_engine(client: TestClient, async_llm) -> None:
    async_llm.die()
    answer = client.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_dead")


# ---- the description


def operations(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{m} {path}": operation for path, item in schema["paths"].items() for m, operation in item.items()}


def test_openapi_describes_errors_as_they_are(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    assert schema["info"]["version"] == quire.__version__
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    described = operations(schema)
    assert all("422" not in operation["responses"] for operation in described.values())
    assert {"400", "404", "413", "415", "503"} <= set(described["post /tokenize"]["responses"])
    assert "404" in described["get /v1/models/{model}"]["responses"]
    assert "503" in described["get /health"]["responses"]
    assert all("401" not in operation["responses"] for operation in described.values())


def test_openapi_describes_keys(make_client: Callable[..., TestClient]) -> None:
    schema = make_client(api_key=["sesame"]).get("/openapi.json", headers={"x-api-key": "sesame"}).json()
    assert schema["components"]["securitySchemes"] == {"APIKey": {"type": "http", "scheme": "bearer"}}
    for name, operation in operations(schema).items():
        is_public = name.split()[1] in ("/health", "/ping", "/load", "/metrics", "/version")
        assert ("security" in operation, "401" in operation["responses"]) == (not is_public, not is_public)
    assert "sesame" not in str(schema)


def test_docs_can_be_left_out(client: TestClient, make_client: Callable[..., TestClient]) -> None:
    assert "openapi.json" in client.get("/docs").text
    closed = make_client(disable_fastapi_docs=True)
    assert [closed.get(path).status_code for path in ("/docs", "/openapi.json", "/redoc")] == [404] * 3


def test_a_description_below_a_root_path(make_state: Callable[..., Any]) -> None:
    client = TestClient(build_app(make_state(root_path="/llm")))
    assert client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert "/llm/openapi.json" in client.get("/docs").text
