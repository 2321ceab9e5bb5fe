"""Requests in the log, where the operator asked for them: quoted, cut, and nothing of them else."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

SECRET = "My secret is 1234.\nCRITICAL all is lost"


def log_of(make_server: Callable[..., Any], caplog: pytest.LogCaptureFixture, body: Any, **options: Any) -> list[str]:
    caplog.clear()
    with TestClient(make_server(**options).app) as client, caplog.at_level(logging.INFO, "quire"):
        assert client.post("/v1/completions", json={"max_tokens": 2} | body).status_code == 200
    return [message for message in caplog.messages if message.startswith("request ")]


def test_requests_are_logged_if_asked_for(make_server: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    assert log_of(make_server, caplog, {"prompt": SECRET}) == []
    (line,) = log_of(make_server, caplog, {"prompt": SECRET, "temperature": 0.5}, enable_log_requests=True)
    assert r"'My secret is 1234.\nCRITICAL all is lost'" in line
    assert "\n" not in line
    assert "temperature=0.5" in line
    (line,) = log_of(make_server, caplog, {"prompt": SECRET}, enable_log_requests=True, max_log_len=9)
    assert "'My secret'..." in line
    assert "1234" not in line
    (line,) = log_of(make_server, caplog, {"prompt": [5, 6, 7]}, enable_log_requests=True, max_log_len=2)
    assert "3 prompt tokens: token ids [5, 6];" in line
    lines = log_of(make_server, caplog, {"prompt": ["Hi"] * 103}, enable_log_requests=True)
    assert len(lines) == 101
    assert lines[-1].endswith(": 3 more prompts")
