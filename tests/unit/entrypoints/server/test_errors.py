"""Every exception becomes an error of OpenAI's form, and tells what a client may know."""

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException

from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.errors import (
    AuthenticationError,
    ErrorInfo,
    ModelNotFoundError,
    describe,
    error_body,
    error_response,
)
from quire.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotYetSupportedError,
    OverloadedError,
    RequestFailedError,
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequestError("no.", "top_p"), 400, "invalid_request_error", "top_p", None),
        (InvalidRequestError("no.", "prompt", "context_length_exceeded"), 400, "invalid_request_error", "prompt",
         "context_length_exceeded"),
        (NotYetSupportedError("no."), 400, "invalid_request_error", None, "not_supported"),
        (ModelNotFoundError("x", ["demo"]), 404, "invalid_request_error", "model", "model_not_found"),
        (AuthenticationError("Bearer"), 401, "authentication_error", None, "invalid_api_key"),
        (HTTPException(404), 404, "invalid_request_error", None, "not_found"),
        (HTTPException(405), 405, "invalid_request_error", None, "method_not_allowed"),
        (HTTPException(413, "big"), 413, "invalid_request_error", None, "body_too_large"),
        (OverloadedError("full."), 503, "server_error", None, "overloaded"),
        (EngineDeadError("dead."), 500, "server_error", None, "engine_dead"),
        (RequestFailedError("failed."), 500, "server_error", None, "request_failed"),
        (ZeroDivisionError("/home/secret"), 500, "server_error", None, None),
    ],
)  # fmt: skip
def test_kinds(error: Exception, status: int, kind: str, param: str | None, code: str | None) -> None:
    response = error_response(error, SCOPE)
    body = json.loads(bytes(response.body))["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert (response.status_code, body["type"], body["param"], body["code"]) == (status, kind, param, code)
    assert body["message"]
    assert "secret" not in body["message"]


def test_headers() -> None:
    assert error_response(OverloadedError("full.", retry_after=7), SCOPE).headers["retry-after"] == "7"
    assert error_response(AuthenticationError("Bearer"), SCOPE).headers["www-authenticate"] == "Bearer"
    assert error_response(HTTPException(405, headers={"Allow": "GET"}), SCOPE).headers["allow"] == "GET"


def test_body() -> None:
    shape = {"error": {"message": "m", "type": "t", "param": None, "code": None}}
    assert json.loads(error_body(ErrorInfo(400, "m", "t"))) == shape


@pytest.mark.parametrize("error", [InvalidRequestError("x" * 5000), ModelNotFoundError("x" * 5000, ["demo"])])
def test_what_a_client_sent_is_quoted_in_part(error: Exception) -> None:
    assert len(describe(error).message) <= 1000


class _Message(BaseModel):
    role: str
    content: str | list[dict[str, str]]


class _Body(BaseModel):
    messages: list[_Message]
    temperature: float = Field(1.0, ge=0, le=2)
    stop: str | list[str] | None = None


SCOPE = {"path": "/v1/models", "headers": []}
_GOOD = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "messages: Field required"),
        ({"messages": 3}, "messages", "messages: Input should be a valid list (it is 3)"),
        ({"messages": [_GOOD], "temperature": 3}, "temperature",
         "temperature: Input should be less than or equal to 2 (it is 3)"),
        ({"messages": [_GOOD, {"role": "user"}]}, "messages[1].content", "messages[1].content: Field required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content",
         "messages[0].content: Input should be a valid string; or Input should be a valid list (it is 5)"),
        ({"messages": [_GOOD], "stop": 1}, "stop", "stop: Input should be a valid string; or Input should be"),
        ({"messages": [_GOOD], "stop": ["x", 5]}, "stop[1]", "stop[1]: Input should be a valid string (it is 5)"),
        ({"messages": [_GOOD, {"role": "user", "content": [{}, 5]}]}, "messages[1].content[1]",
         "messages[1].content[1]: Input should be a valid dictionary (it is 5)"),
        ({"messages": [_GOOD], "temperature": [1]}, "temperature",
         "temperature: Input should be a valid number (it is a list)"),
        ({"messages": {}}, "messages", "messages: Input should be a valid list (it is an object)"),
        ({"messages": [_GOOD], "temperature": "x" * 5000}, "temperature", "temperature: Input should be a valid"),
    ],
)  # fmt: skip
def test_a_validation_error_names_the_field(body: Any, param: str, message: str) -> None:
    with pytest.raises(ValidationError) as failure:
        _Body.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in failure.value.errors()]
    for error in (RequestValidationError(errors, body=body), failure.value):
        info = describe(error)
        assert (info.status, info.param) == (400, param)
        assert info.message.startswith(message)
        assert len(info.message) < 300


@pytest.mark.parametrize(("seed", "kind"), [(-(2**63) - 1, "greater_than_equal"), (2**64, "less_than_equal")])
def test_a_number_out_of_its_range_is_told_in_pydantics_word_too(seed: int, kind: str) -> None:
    """Clients of vLLM look for it."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "x", "seed": seed})
    assert describe(caught.value).message.endswith(f"(it is {seed}) [{kind}]")
