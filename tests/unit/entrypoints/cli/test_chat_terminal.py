"""`quire chat` in a pseudo-terminal, as a person meets it: with prompt_toolkit and rich, and without them."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_PATIENCE = 20.0
_START = """
import sys
if {plain}:
    sys.modules["prompt_toolkit"] = None
from quire.entrypoints.cli.main import main
sys.exit(main(["chat", "--url", {url!r}]))
"""
_ESCAPES = re.compile(rb"\x1b(\[[0-9;?]*[a-zA-Z~]|\][^\x07]*\x07|[=>()][0-9AB]?)")


class Terminal:
    """A `quire chat` on a terminal of its own."""

    def __init__(self, url: str, home: Path, plain: bool) -> None:
        self._end, other = pty.openpty()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("XDG_")} | {
            "HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "100", "LINES": "40"
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START.format(plain=plain, url=url)],
            stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(other)
        self.shown = b""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, text: str) -> str:
        """What is shown to the end of `text`, from where the last call ended."""
        deadline = time.monotonic() + _PATIENCE
        while (position := self._text().find(text)) < 0:
            assert time.monotonic() < deadline, f"{text!r} is not in {self._text()!r}"
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._end, 65536)
                except OSError:  # the other side is closed
                    assert text in self._text(), f"{text!r} is not in {self._text()!r}"
        result, rest = self._text()[: position + len(text)], self._text()[position + len(text) :]
        self.shown = rest.encode()
        return result

    def _text(self) -> str:
        return _ESCAPES.sub(b"", self.shown).decode(errors="replace").replace("\r", "")

    def leave(self) -> None:
        self.type("/quit\r")
        assert self.process.wait(_PATIENCE) == 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture(params=["prompt_toolkit", pytest.param("plain", marks=pytest.mark.slow)])
def open_terminal(request: pytest.FixtureRequest, server: Any, tmp_path: Path) -> Iterator[Callable[[], Terminal]]:
    """Starts `quire chat` with the fake server, and waits for its prompt."""
    plain, opened = request.param == "plain", list[Terminal]()
    if not plain:
        pytest.importorskip("prompt_toolkit")

    def start() -> Terminal:
        opened.append(Terminal(server.url, tmp_path, plain))
        greeting = opened[-1].wait_for(">")
        assert ("pip install prompt-toolkit rich" in greeting) == plain
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def questions(server: Any) -> list[str]:
    return [body["messages"][-1]["content"] for body in server.bodies("/v1/chat/completions")]


def test_three_lines_are_pasted_as_one_question(open_terminal: Callable[[], Terminal], server: Any) -> None:
    terminal = open_terminal()
    terminal.type("\x1b[200~one\rtwo\rthree\x1b[201~")
    terminal.wait_for("three")
    terminal.type("\r")
    terminal.wait_for("tokens/s]")
    terminal.leave()
    assert questions(server) == ["one\ntwo\nthree"]


def test_a_block_and_lines_that_go_on(open_terminal: Callable[[], Terminal], server: Any) -> None:
    terminal = open_terminal()
    for line, shown in (('"""one', "one"), ('two"""', "tokens/s]"), ("three\\", "three"), ("four", "tokens/s]")):
        terminal.type(f"{line}\r")
        terminal.wait_for(shown)
    terminal.leave()
    assert questions(server) == ["one\ntwo", "three\nfour"]


@pytest.mark.parametrize("open_terminal", ["prompt_toolkit"], indirect=True)
def test_the_next_run_goes_back_to_this_ones_questions(
    open_terminal: Callable[[], Terminal], server: Any, tmp_path: Path
) -> None:
    terminal = open_terminal()
    terminal.type("what was\r")
    terminal.wait_for("tokens/s]")
    terminal.leave()
    terminal = open_terminal()
    terminal.type("\x1b[A\x1b[A")  # /quit, and what was
    terminal.wait_for("what was")
    terminal.type(" it\r")
    terminal.wait_for("tokens/s]")
    terminal.leave()
    assert questions(server) == ["what was", "what was it"]
    folder = tmp_path / ".local/state/quire"
    assert folder.stat().st_mode & 0o077 == 0


def test_ctrl_c_in_an_answer_ends_it_and_no_more(open_terminal: Callable[[], Terminal], server: Any) -> None:
    def stall(handler: Any, body: Any) -> None:
        if len(server.bodies("/v1/chat/completions")) > 1:
            return handler.stream(server.answer, chat=True)
        handler.start_stream()
        handler.send_event({"choices": [{"delta": {"content": "Once upon"}}]})
        while True:  # an endless answer, until the client goes
            handler.send_event({"choices": []})
            time.sleep(0.01)

    server.answers["/v1/chat/completions"] = stall
    terminal = open_terminal()
    terminal.type("hi\r")
    terminal.wait_for("Once upon")
    os.killpg(terminal.process.pid, signal.SIGINT)  # what the terminal does at a Ctrl-C
    terminal.wait_for("[stopped]")
    assert server.broken.wait(_PATIENCE)
    terminal.wait_for("\n>")
    terminal.type("go on\r")
    terminal.wait_for("tokens/s]")
    terminal.leave()
    assert [each["content"] for each in server.bodies("/v1/chat/completions")[1]["messages"]] == [
        "hi", "Once upon", "go on"
    ]  # fmt: skip


def test_a_full_context_is_told_once_and_the_oldest_turn_goes(
    open_terminal: Callable[[], Terminal], server: Any
) -> None:
    def answer(handler: Any, body: Any) -> None:
        if len(body["messages"]) > 3:
            message = "this model's maximum context length is 512 tokens, ..."
            return handler.send_json(400, {"error": {"message": message}})
        return handler.stream(server.answer, chat=True)

    server.answers["/v1/chat/completions"] = answer
    terminal = open_terminal()
    for question in ("one", "two"):
        terminal.type(f"{question}\r")
        terminal.wait_for("tokens/s]")
        terminal.wait_for("\n>")
    terminal.type("three\r")
    assert "error" not in terminal.wait_for("Forget the oldest turns, now and whenever it is? [Y/n] ")
    terminal.type("\r")
    terminal.wait_for("[forgot the oldest 1 of 2 turns]")
    terminal.wait_for("tokens/s]")
    terminal.wait_for("\n>")
    terminal.type("four\r")
    assert "Forget" not in terminal.wait_for("tokens/s]")
    terminal.leave()
    told = server.bodies("/v1/chat/completions")
    assert [each["content"] for each in told[-1]["messages"]] == ["three", "Once more é.", "four"]


def test_markdown_is_rendered_while_it_comes(open_terminal: Callable[[], Terminal], server: Any) -> None:
    server.answer = ["# Ti", "tle\n\nSome *wo", "rds*.\n\n```py\nx", " = 1\n```\n", "\nLast."]
    terminal = open_terminal()
    terminal.type("hi\r")
    shown = terminal.wait_for("tokens/s]")
    terminal.leave()
    assert "Last." in shown
    plain = "# Title" in shown
    assert ("Some words." in shown) != plain
