"""The conversation of `quire chat`: commands, texts of several lines, answers that are cut, a full context."""

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from quire.entrypoints.cli.talk import COMMANDS, Answer, Messages, Talk, commands_help
from quire.entrypoints.cli.terminal import Keyboard, finished_blocks, is_open, show, unblocked
from quire.errors import InvalidRequestError


class Typist(Keyboard):
    """Types these texts, and answers questions with yes or no."""

    def __init__(self, *texts: str, yes: bool = True) -> None:
        super().__init__(False, "")
        self.interactive, self.texts, self.yes, self.asked = True, list(texts), yes, []

    def read(self, default: str = "") -> str | None:
        self.default = default
        return self.texts.pop(0) if self.texts else None

    def confirm(self, question: str) -> bool:
        self.asked.append(question)
        return self.yes


class Model:
    """Answers with the number of the request; holds so many characters, and cuts what does not fit in them."""

    def __init__(self, room: int = 10**6) -> None:
        self.room, self.seen = room, list[Messages]()

    def __call__(self, messages: Messages, answer: Answer) -> Generator[str, None, None]:
        used = sum(len(message["content"]) for message in messages)
        if used >= self.room:
            raise InvalidRequestError(f"this model's maximum context length is {self.room} tokens, ...")
        self.seen.append(messages)
        text = f"answer {len(self.seen)}"[: self.room - used]
        answer.note(1, None)
        answer.note(len(text), "length" if used + len(text) == self.room else "stop")
        yield text


def talk(model: Model, *texts: str, yes: bool = True, **given: Any) -> tuple[Talk, Typist]:
    typist = Typist(*texts, yes=yes)
    conversation = Talk(model, given, typist, "")
    conversation.run()
    return conversation, typist


def contents(messages: Messages) -> list[str]:
    return [message["content"] for message in messages]


def test_an_answer_is_asked_for_again_and_a_question_is_edited() -> None:
    model = Model()
    _, typist = talk(model, "one", "two", "/regenerate", "/edit three", "/edit", "four")
    assert contents(model.seen[2]) == contents(model.seen[1]) == ["one", "answer 1", "two"]
    assert contents(model.seen[3]) == ["one", "answer 1", "three"]
    assert contents(model.seen[4]) == ["one", "answer 1", "four"]
    assert typist.default == ""


def test_a_question_that_is_edited_into_a_refused_one_stays_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = talk(Model(room=100), "one", "/edit " + "x" * 200, yes=False)
    assert contents(conversation.turns) == ["one", "answer 1"]
    assert "the question is too long" in capsys.readouterr().err


def test_there_is_nothing_to_edit_yet(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Model(), "/regenerate", "/edit x")
    assert capsys.readouterr().err == "error: there is no question yet.\n" * 2


def test_parameters_are_set_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"top_k": 3}
    texts = ["/set temperature 0.7", "/set temperature warm", "/set temperature -1", "/set tempature 1"]
    conversation, _ = talk(Model(), *texts, "/set top-k", "/set ignore_eos true", "/set", **given)
    assert conversation.given == {"temperature": 0.7, "ignore_eos": True}
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "temperature = 0.7, ignore_eos = True"
    first, second, third = err.splitlines()
    assert first.startswith("error: temperature can't be 'warm'")
    assert second.startswith("error: temperature can't be '-1': temperature must be ")
    assert second[-2:] != ".."
    assert third == "error: /set has no argument 'tempature'. Did you mean 'temperature'?"


def test_a_conversation_is_saved_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talk.json"
    talk(Model(), "/system Be kind.", "one é", f"/save {path}")
    assert contents(json.loads(path.read_text("utf-8"))) == ["Be kind.", "one é", "answer 1"]
    model = Model()
    talk(model, f"/load {path}", "two")
    assert contents(model.seen[0]) == ["Be kind.", "one é", "answer 1", "two"]
    capsys.readouterr()
    path.write_text('[{"role": "assistant", "content": "x"}]')
    conversation, _ = talk(Model(), f"/load {path}", f"/load {tmp_path}/none", f"/save {tmp_path}", "/load")
    assert conversation.turns == []
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_instructions_change_and_the_oldest_turns_are_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    talk(
        model,
        "one",
        "/system Be brief.",
        "two",
        "/forget",
        "three",
        "/forget 9",
        "four",
        "/forget x",
        f"/forget {'9' * 5000}",
        "/system",
    )
    assert contents(model.seen[1]) == ["Be brief.", "one", "answer 1", "two"]
    assert contents(model.seen[2]) == ["Be brief.", "two", "answer 2", "three"]
    assert contents(model.seen[3]) == ["Be brief.", "four"]
    out, err = capsys.readouterr()
    assert "[forgot the oldest 1 of 2 turns]" in out
    assert "[forgot the oldest 2 of 2 turns]" in out
    assert "Instructions: Be brief." in out.splitlines()[-1]
    assert "'x'" in err
    assert f"how many are '{'9' * 79}?" in err


def test_help_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Model(), "/help", "/regenrate", "/usr/bin is a path", "/quit", "unread")
    out = capsys.readouterr().out
    assert all(f"\n  /{name} " in f"\n{out}" for name in COMMANDS)
    assert "There is no command /regenrate. /help lists them." in out
    assert "answer 1\n" in out
    assert "answer 2" not in out
    assert "temperature 0.7" in commands_help()


def test_commands_of_ollama_and_llama_cpp_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    conversation, _ = talk(
        model, "/?", "/set parameter temperature 0.7", "one", "/clear", "two", "/regen", "/bye", "three"
    )
    assert conversation.given == {"temperature": 0.7}
    assert contents(conversation.turns) == ["two", "answer 3"]
    assert "/regenerate" in capsys.readouterr().out


def test_an_answer_tells_its_speed_and_that_it_was_cut(capsys: pytest.CaptureFixture[str]) -> None:
    talk(Model(room=10), "one", max_tokens=7)
    out = capsys.readouterr().out
    assert "[7 tokens, " in out
    assert " tokens/s; cut: max_tokens or the end of the context is reached]\n" in out


@pytest.mark.parametrize(("room", "forgot", "cut"), [(40, "1 of 2", False), (45, "2 of 3", True)])
def test_a_full_context_is_told_once_and_the_oldest_turns_go(
    room: int, forgot: str, cut: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(room=room)
    _, typist = talk(model, *["question"] * 6)
    assert typist.asked == ["The context is full. Forget the oldest turns, now and whenever it is?"]
    assert len(model.seen) == 6
    out = capsys.readouterr().out
    assert f"[forgot the oldest {forgot} turns]" in out
    assert ("cut: max_tokens or the end of the context" in out) == cut
    assert all(sum(map(len, contents(messages))) < room for messages in model.seen)


def test_a_full_context_is_left_as_it_is_where_the_user_says_no(capsys: pytest.CaptureFixture[str]) -> None:
    conversation, typist = talk(Model(room=40), *["question"] * 6, "/reset", "question", yes=False)
    assert len(typist.asked) == 1
    out, err = capsys.readouterr()
    assert set(err.splitlines()) == {
        "error: the context is full: '/forget N' forgets the oldest N turns, '/reset' all of them."
    }
    assert "[forgot" not in out
    assert len(conversation.turns) == 2


# ---- texts of several lines


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (['"""one', "two", 'three"""'], "one\ntwo\nthree"),
        (['"""', "one", '"""'], "\none\n"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""one"""'], "one"),
        (['say """ twice'], 'say """ twice'),
    ],
)
def test_lines_that_belong_together(lines: list[str], text: str) -> None:
    for count in range(1, len(lines)):
        assert is_open("\n".join(lines[:count]))
    assert not is_open("\n".join(lines))
    assert unblocked("\n".join(lines)) == text


def test_blocks_in_piped_input(give_input: Any) -> None:
    give_input('one\n"""two\n\nthree"""\nfour\\\nfive\n\n"""six\nseven')
    assert list(Keyboard(False, "")) == ["one", "two\n\nthree", "four\nfive", '"""six\nseven'.removeprefix('"""')]


# ---- what is shown


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one\n", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("- one\n\n    more", ""),
        ("```py\nx\n\ny\n", ""),
        ("```py\nx\n\ny\n```\n", ""),
        ("```py\nx\n\ny\n```\nand", "```py\nx\n\ny\n```\n"),
        ("one\n\n```\nx", "one\n\n"),
        ("~~~~\n~~~\n\nx", ""),
    ],
)
def test_blocks_of_markdown_that_nothing_can_change(text: str, finished: str) -> None:
    assert text[: finished_blocks(text)] == finished


def test_a_model_does_not_move_the_cursor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert show((piece for piece in ["a\x1b[2J", "\tb\n\x9b2J"]), True) == "a\x1b[2J\tb\n\x9b2J"
    assert capsys.readouterr().out == "a[2J\tb\n2J\n"


def test_markdown_is_rendered_where_rich_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setitem(os.environ, "COLUMNS", "60")
    text = "# Title\n\nSome *words*.\n\n```py\nx = 1\n\ny = 2\n```\n\n- last"
    assert show((text[i : i + 3] for i in range(0, len(text), 3)), False, True) == text
    out = capsys.readouterr().out
    assert "Some words." in out
    assert "x = 1" in out
    assert "```" not in out
    assert "• last" in out
