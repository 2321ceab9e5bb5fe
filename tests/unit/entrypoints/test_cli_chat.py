"""`quire chat` against a fake `LLM` and a fake server: what is remembered, what commands do, what Ctrl-C stops."""

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from quire.entrypoints.cli.main import main


def conversations(llm: Any) -> list[str]:
    """The prompts that the engine got, as text."""
    return ["".join(map(chr, prompt["prompt_token_ids"])) for prompt, _ in llm.llm_engine.requests]


def test_chat_remembers_resets_and_takes_instructions(
    fake_llm: Any, capsys: pytest.CaptureFixture[str], give_input: Callable[[str], None]
) -> None:
    give_input("hi\n\nand?\n/reset\nnew\n/system Be brief.\nagain\n/reset\nlast\n/nope\n/quit\nunread\n")
    assert main(["chat", "some/model"]) == 0
    assert conversations(fake_llm.made[0]) == [
        "user:hi",
        "user:hi|assistant:Once more é.|user:and?",
        "user:new",
        "system:Be brief.|user:new|assistant:Once more é.|user:again",
        "system:Be brief.|user:last",
    ]
    out = capsys.readouterr().out.splitlines()
    assert out.count("Once more é.") == 5
    assert out[-1] == "There is no command /nope. /help lists them."
    assert fake_llm.made[0].llm_engine.requests[0][1].max_tokens is None


def test_chat_ends_with_the_input(fake_llm: Any, give_input: Callable[[str], None]) -> None:
    give_input("hi")
    assert main(["chat", "demo", "--system", "Be kind.", "--max-tokens", "9"]) == 0
    assert conversations(fake_llm.made[0]) == ["system:Be kind.|user:hi"]
    assert fake_llm.made[0].llm_engine.requests[0][1].max_tokens == 9


class Terminal:
    """A terminal at which the user types these lines; an exception stands for a key such as Ctrl-C."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = list(lines)

    def isatty(self) -> bool:
        return True

    def input(self, prompt: str = "") -> str:
        line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, str):
            return line
        raise line


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    fake_llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal("hi", KeyboardInterrupt, "go on")
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", terminal.input)
    steps: list[int] = []

    def interrupt_second_step() -> None:
        steps.append(1)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)

    fake_llm.on_step = interrupt_second_step
    handler = signal.getsignal(signal.SIGINT)
    assert main(["chat", "demo"]) == 0
    assert signal.getsignal(signal.SIGINT) is handler
    assert conversations(fake_llm.made[0]) == ["user:hi", "user:hi|assistant:Once more |user:go on"]
    assert len(fake_llm.made[0].llm_engine.aborted) == 1
    out = capsys.readouterr().out
    assert "Once more  [stopped]\n" in out
    assert "Once more é.\n" in out


def test_a_refused_question_is_forgotten_at_a_terminal(
    fake_llm: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    give_input: Callable[[str], None],
) -> None:
    fake_llm.refuse = lambda prompt: len(prompt["prompt_token_ids"]) > 20
    terminal = Terminal("x" * 30, "hi")
    with monkeypatch.context() as patches:
        patches.setattr(sys, "stdin", terminal)
        patches.setattr("builtins.input", terminal.input)
        assert main(["chat", "demo"]) == 0
    assert conversations(fake_llm.made[0]) == ["user:hi"]
    assert "error: prompt is refused.\n" in capsys.readouterr().err
    give_input("x" * 30 + "\nhi\n")
    assert main(["chat", "demo"]) == 2


# ---- with a server


def test_a_server_answers_where_no_model_is_named(
    server: Any, capsys: pytest.CaptureFixture[str], give_input: Callable[[str], None]
) -> None:
    give_input("hi\n/system Be brief.\nagain\n")
    assert main(["chat", "--url", server.url, "--temperature", "0.5", "--seed", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == ["Once more é.", "Instructions: Be brief.", "Once more é."]
    first, second = server.bodies("/v1/chat/completions")
    assert first == {
        "model": "first", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "seed": 3,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]


def test_a_server_is_told_the_whole_conversation(server: Any, give_input: Callable[[str], None]) -> None:
    give_input("hi\nand?\n")
    assert main(["chat", "--url", server.url, "--model-name", "second", "--system-prompt", "Be kind."]) == 0
    contents = [message["content"] for message in server.bodies("/v1/chat/completions")[1]["messages"]]
    assert contents == ["Be kind.", "hi", "Once more é.", "and?"]
    assert server.bodies("/v1/chat/completions")[1]["model"] == "second"
    assert server.bodies("/v1/models") == []  # a model was named: there was nothing to ask


def test_more_tokens_than_the_context_has_left_are_no_reason_to_forget(
    server: Any, capsys: pytest.CaptureFixture[str], give_input: Callable[[str], None]
) -> None:
    """--max-tokens is the most of an answer: where the context has less, it gives what it has."""

    def answer(handler: Any, body: Any) -> None:
        if "max_tokens" in body:
            message = "this model's maximum context length is 512 tokens, but the prompt has 40 and max_tokens asks ..."
            return handler.send_json(400, {"error": {"message": message}})
        return handler.stream(server.answer, chat=True)

    server.answers["/v1/chat/completions"] = answer
    give_input("hi\nagain\n")
    assert main(["chat", "--url", server.url, "--max-tokens", "500"]) == 0
    assert capsys.readouterr().out == "Once more é.\n" * 2
    assert [body.get("max_tokens") for body in server.bodies("/v1/chat/completions")] == [500, None] * 2


def test_one_question(server: Any, fake_llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", server.url, "-q", "hi"]) == 0
    assert main(["chat", "demo", "--quick", "hi"]) == 0
    assert capsys.readouterr().out == "Once more é.\n" * 2


def test_ctrl_c_stops_a_servers_answer_at_once(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stall(handler: Any, body: Any) -> None:
        handler.start_stream()
        handler.send_event({"choices": [{"delta": {"content": "Once "}}]})
        if len(server.bodies("/v1/chat/completions")) > 1:
            handler.send_event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            return handler.send_chunk(b"")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while True:  # an endless answer, until the client goes
            handler.send_event({"choices": []})

    server.answers["/v1/chat/completions"] = stall
    terminal = Terminal("hi", "go on")
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", terminal.input)
    assert main(["chat", "--url", server.url]) == 0
    assert server.broken.wait(5)
    assert " [stopped]\n" in capsys.readouterr().out
    assert len(server.bodies("/v1/chat/completions")) == 2


def test_a_servers_refusal_is_shown_and_forgotten(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], give_input: Callable[[str], None]
) -> None:
    def refuse(handler: Any, body: Any) -> None:
        if "x" in body["messages"][-1]["content"]:
            return handler.send_json(400, {"error": {"message": "too long.", "type": "invalid_request_error"}})
        return handler.stream(server.answer, chat=True)

    server.answers["/v1/chat/completions"] = refuse
    terminal = Terminal("xxx", "hi")
    with monkeypatch.context() as patches:
        patches.setattr(sys, "stdin", terminal)
        patches.setattr("builtins.input", terminal.input)
        assert main(["chat", "--url", server.url]) == 0
    assert "error: too long.\n" in capsys.readouterr().err
    assert server.bodies("/v1/chat/completions")[1]["messages"] == [{"role": "user", "content": "hi"}]
    give_input("xxx\nhi\n")
    assert main(["chat", "--url", server.url]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--url", "http://localhost:1"], "--url is about a server"),
        (["--model", "demo", "--api-key", "k"], "--api-key is about a server"),
        (["--max-model-len", "64"], "--max-model-len is about an engine in this process"),
        (["--url", "ftp://x"], "is no server's address"),
    ],
)
def test_flags_of_the_other_kind_are_refused(
    fake_llm: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *arguments, "-q", "hi"]) == 2
    assert message in capsys.readouterr().err
    assert fake_llm.made == []


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "-q", "hi"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for words in ("no server answers at http://127.0.0.1:1", "`quire serve`", "`quire chat demo`"):
        assert words in err
