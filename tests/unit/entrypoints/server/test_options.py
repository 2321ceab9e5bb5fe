"""The server's options: their defaults, their ranges, and that none of them shows a key."""

import dataclasses
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli.flags import documentation
from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError


def test_defaults() -> None:
    args = ServerArgs()
    assert (args.host, args.port, args.api_key, args.served_model_name) == (None, 8000, None, None)
    assert (args.allowed_origins, args.shutdown_timeout, args.engine) == ([], 0.0, "process")


def test_every_option_has_a_help_text_and_a_name_of_its_own() -> None:
    fields = dataclasses.fields(ServerArgs)
    assert all(documentation(ServerArgs)[field.name].endswith(".") for field in fields)
    assert not {field.name for field in fields} & {field.name for field in dataclasses.fields(EngineArgs)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "port must be an integer, from 0 to 65535, got 70000."),
        ({"port": -1}, "port must be"),
        ({"port": True}, "port must be an integer"),
        ({"port": 80.5}, "port must be an integer"),
        ({"shutdown_timeout": -1}, "shutdown_timeout must be a number, at least 0, got -1."),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout must be a number"),
        ({"timeout_headers": 0}, "timeout_headers must be a number, at least 0.1, got 0."),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs must be an integer, at least 1, got 0."),
        ({"max_body_bytes": "1"}, "max_body_bytes must be an integer"),
        ({"log_level": "loud"}, "log_level must be one of 'debug', 'info'"),
        ({"uvicorn_log_level": "loud"}, "uvicorn_log_level must be one of"),
        ({"max_log_len": 5}, "max_log_len=5 needs enable_log_requests"),
        ({"max_log_len": -1, "enable_log_requests": True}, "max_log_len must be an integer, at least 0, got -1."),
        ({"enable_log_requests": True, "disable_log_requests": True}, "enable_log_requests and disable_log"),
        ({"engine": "fork"}, "engine must be one of 'process', 'thread'"),
        ({"api_key": [""]}, "api_key must be a list of non-empty, printable texts"),
        ({"served_model_name": ["a\udcff"]}, "served_model_name must be a list of non-empty, printable texts"),
        ({"api_key": ["a\n"]}, "api_key must be a list of non-empty, printable texts"),
        ({"api_key": []}, "api_key must be a list of non-empty, printable texts"),
        ({"served_model_name": [""]}, "served_model_name must be"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile and ssl_certfile go together"),
        ({"ssl_cert_reqs": 2}, "ssl_ca_certs and ssl_cert_reqs need"),
        ({"root_path": "llm"}, "root_path must begin with a slash"),
        ({"root_path": "/llm/"}, "root_path must begin with a slash and not end with one"),
        ({"response_role": ""}, "response_role must not be empty"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ServerArgs(**options)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    "options", [{"api_key": ["sesame", ""]}, {"api_key": ["sesame"], "port": -1}, {"api_key": "sesame"}]
)
def test_no_text_shows_a_key(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        ServerArgs(**options)
    assert "sesame" not in str(refusal.value)
    assert "sesame" not in repr(ServerArgs(api_key=["sesame"]))


@pytest.mark.parametrize(
    ("options", "logs"),
    [
        ({}, False),
        ({"log_level": "debug"}, True),
        ({"log_level": "debug", "disable_log_requests": True}, False),
        ({"log_level": "debug", "disable_uvicorn_access_log": True}, False),
    ],
)
def test_who_logs_requests(options: dict[str, Any], logs: bool) -> None:
    assert ServerArgs(**options).logs_requests is logs


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, []),
        ({"allowed_origins": ["https://a.example"]}, []),
        ({"allowed_origins": ["*"]}, ["any web page that somebody opens"]),
        ({"allowed_origins": ["*"], "api_key": ["k"]}, []),
        ({"allowed_origins": ["*"], "api_key": ["k"], "allow_credentials": True}, ["any web page that somebody opens"]),
        ({"trust_request_chat_template": True}, ["Jinja programs of theirs"]),
    ],
)
def test_what_options_risk_is_told(options: dict[str, Any], told: list[str]) -> None:
    risks = ServerArgs(**options).risks()
    assert len(risks) == len(told)
    assert all(part in risk for part, risk in zip(told, risks, strict=True))
