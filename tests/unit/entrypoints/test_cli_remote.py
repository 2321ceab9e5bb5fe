"""The client of `quire chat` and `quire complete` against a fake server: addresses, keys, and all that goes wrong."""

import socket
import ssl
import subprocess
import threading
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire.entrypoints.cli.load.events import error_words
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.remote import Address, RemoteError, Server
from quire.errors import ConfigError, InvalidRequestError

COMPLETIONS = "/v1/completions"


def texts(server: Any, **flags: Any) -> list[str]:
    return list(Server.of_flags(Namespace(url=server.url, **flags)).texts("/completions", {"prompt": "x"}))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://localhost:8000/v1", Address("localhost", 8000, "/v1")),
        ("localhost:8000", Address("localhost", 8000, "/v1")),
        ("https://example.org/llm/v1/", Address("example.org", 443, "/llm/v1", encrypted=True)),
        ("http://[::1]:80/", Address("::1", 80, "/v1")),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert Address.parse(url) == address


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://[::1", "http://h:70000"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="no server's address"):
        Address.parse(url)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "m", "type": "t", "code": "c"}}', ("m", "c")),
        (b'{"error": {"message": "m", "type": "t", "code": 400}}', ("m", "t")),
        (b'{"object": "error", "message": "m", "code": null, "type": null}', ("m", None)),
        (b'{"detail": "d"}', ("d", None)),
        (b'{"error": "e"}', ("e", None)),
        (b"Bad Gateway\n", ("Bad Gateway", None)),
        (b"", ("no reason given", None)),
    ],
)
def test_words_of_errors(body: bytes, words: tuple[str, str | None]) -> None:
    assert error_words(body) == words


def test_streams_text_of_the_first_model(server: Any) -> None:
    assert texts(server) == ["Once ", "more ", "é."]
    assert server.bodies(COMPLETIONS) == [{"model": "first", "prompt": "x", "stream": True}]


@pytest.mark.parametrize(
    ("flags", "environment", "sent"),
    [
        ({"api_key": "given"}, {"QUIRE_API_KEY": "q"}, "Bearer given"),
        ({}, {"QUIRE_API_KEY": "q", "OPENAI_API_KEY": "o"}, "Bearer q"),
        ({}, {"OPENAI_API_KEY": "o"}, "Bearer o"),
        ({}, {}, None),
    ],
)
def test_keys(
    server: Any, flags: dict[str, str], environment: dict[str, str], sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUIRE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    texts(server, **flags)
    assert {headers.get("authorization") for _, headers, _ in server.requests} == {sent}


def test_a_key_from_a_file_of_variables_has_no_end_of_line(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "key\r")
    texts(server)
    assert {headers["authorization"] for _, headers, _ in server.requests} == {"Bearer key"}


def test_half_a_character_goes_to_the_server_which_refuses_it(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers[COMPLETIONS] = lambda h, body: h.send_json(400, {"error": {"message": ascii(body["prompt"])}})
    assert main(["complete", "--url", server.url, "-q", "x\udcff"]) == 2
    assert capsys.readouterr().err == "error: 'x\\udcff'\n"


def test_a_certificate_that_is_not_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [str(tmp_path / "key"), str(tmp_path / "certificate")]
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout {} -out {}".format(*made)
    subprocess.run(command.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made[1], made[0])

    def refused(listener: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True):
            pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=refused, args=(listener,))
        thread.start()
        assert main(["complete", "--url", url, "-q", "x"]) == 1
        thread.join(10)
    assert f"no server answers at {url} ([SSL: CERTIFICATE_VERIFY_FAILED]" in capsys.readouterr().err


def answer_with(*events: Any, end: bytes = b"") -> Callable[[Any, Any], None]:
    """A stream of these events (bytes: raw ones), then `end`; the connection is closed without the last chunk."""

    def answer(handler: Any, body: Any) -> None:
        handler.start_stream()
        for event in events:
            handler.send_chunk(event) if isinstance(event, bytes) else handler.send_event(event)
        handler.wfile.write(end)
        handler.close_connection = True

    return answer


LAST = {"choices": [{"text": "b", "finish_reason": "stop"}]}


def test_other_servers_habits(server: Any) -> None:
    """Comments, no blank after the colon, CRLF, a role of its own, null fields, and no [DONE] at the end."""
    role = {"choices": [{"delta": {"role": "assistant", "content": None}, "finish_reason": None}], "usage": None}
    raw = b': comment\r\nevent: x\r\ndata:{"choices": [{"text": "a", "finish_reason": null, "extra": [1]}]}\r\n\r\n'
    server.answers[COMPLETIONS] = answer_with(role, raw, LAST)
    assert texts(server) == ["a", "b"]


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda h, _: h.send_json(400, {"error": {"message": "no."}}), InvalidRequestError, "no."),
        (
            lambda h, _: h.send_json(401, {"error": {"message": "Who."}}),
            RemoteError,
            r"wants another key \(--api-key\): Who",
        ),
        (lambda h, _: h.send_json(503, {"error": {"message": "busy"}}), RemoteError, "answers 503: busy"),
        (answer_with({"error": {"message": "engine died"}}), RemoteError, "engine died"),
        (answer_with({"choices": [{"text": "a"}]}), RemoteError, "before the answer was complete"),
        (answer_with({"choices": [{"text": 1}]}), RemoteError, "no chunk"),
        (answer_with(b"data: {\n"), RemoteError, "no chunk"),
        (lambda h, _: setattr(h, "close_connection", True), RemoteError, "before the answer was complete"),
    ],
)
def test_failures(server: Any, answer: Callable[[Any, Any], None], error: type[Exception], message: str) -> None:
    server.answers[COMPLETIONS] = answer
    with pytest.raises(error, match=message):
        texts(server)


@pytest.mark.parametrize("models", [{"data": []}, {"data": None}, [], {"data": [{}]}])
def test_no_model(server: Any, models: Any) -> None:
    server.answers["/v1/models"] = lambda handler, _: handler.send_json(200, models)
    with pytest.raises(RemoteError, match="lists no model; name one"):
        texts(server)


def test_leaving_an_answer_closes_the_connection(server: Any) -> None:
    def endless(handler: Any, body: Any) -> None:
        handler.start_stream()
        while True:
            handler.send_event({"choices": [{"text": "a", "finish_reason": None}]})

    server.answers[COMPLETIONS] = endless
    pieces = Server(server.url).texts("/completions", {})
    assert next(pieces) == "a"
    pieces.close()
    assert server.broken.wait(5)


# ---- quire complete


def test_complete_once(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--url", server.url, "--max-tokens", "5", "--top-k", "3", "--seed", "9", "--stop", "X"]
    assert main(["complete", *flags, "-q", " Once"]) == 0
    assert capsys.readouterr().out == "Once more é.\n"
    (body,) = server.bodies(COMPLETIONS)
    sampling = {"max_tokens": 5, "top_k": 3, "seed": 9, "stop": ["X"]}
    assert body == {"model": "first", "prompt": " Once", "stream": True, **sampling}


def test_complete_takes_a_piped_prompt_whole(server: Any, give_input: Callable[[str], None]) -> None:
    give_input("two\nlines\n")
    assert main(["complete", "--url", server.url]) == 0
    assert [(b["prompt"], b["max_tokens"]) for b in server.bodies(COMPLETIONS)] == [("two\nlines", 128)]


def test_complete_at_a_terminal(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["first", "second"]

    def type_line(_: str) -> str:
        if not typed:
            raise EOFError
        return typed.pop(0)

    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda _: True})())
    monkeypatch.setattr("builtins.input", type_line)
    assert main(["complete", "--url", server.url]) == 0
    assert [body["prompt"] for body in server.bodies(COMPLETIONS)] == ["first", "second"]
    assert capsys.readouterr().out.count("Once more é.") == 2


def test_complete_without_a_prompt(
    server: Any, capsys: pytest.CaptureFixture[str], give_input: Callable[[str], None]
) -> None:
    give_input("")
    assert main(["complete", "--url", server.url]) == 2
    assert "no prompt" in capsys.readouterr().err
