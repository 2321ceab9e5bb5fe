"""`quire chat` against a fake `LLM`: what is remembered, what the commands do, what Ctrl-C stops."""

import signal
import sys
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
        "system:Be brief.|user:again",
        "system:Be brief.|user:last",
    ]
    assert capsys.readouterr().out.splitlines()[:5] == ["Once more é."] * 5
    assert fake_llm.made[0].llm_engine.requests[0][1].max_tokens is None


def test_chat_ends_with_the_input(fake_llm: Any, give_input: Callable[[str], None]) -> None:
    give_input("hi")
    assert main(["chat", "--system", "Be kind.", "--max-tokens", "9"]) == 0
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
    assert main(["chat"]) == 0
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
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", terminal.input)
    assert main(["chat"]) == 0
    assert conversations(fake_llm.made[0]) == ["user:hi"]
    assert "error: prompt is refused.\n" in capsys.readouterr().err
    give_input("x" * 30 + "\nhi\n")
    assert main(["chat"]) == 2
