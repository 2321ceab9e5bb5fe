"""A conversation in the terminal: its turns, the commands that change them, and what is done when the context is full.

`quire.entrypoints.cli.chat` says who answers. Must not know whether that is an engine or a server.
"""

import json
import math
import re
import time
from collections.abc import Callable, Generator
from typing import Any, Literal

import msgspec

from quire.entrypoints.cli import session
from quire.entrypoints.cli.files import decode_record, read_text, write_text
from quire.entrypoints.cli.terminal import Keyboard, refusals_shown, show
from quire.errors import InvalidRequestError, QuireError
from quire.utils.values import decimal

Messages = list[dict[str, Any]]
_INPUT_HELP = 'Several lines: paste them, end each with a backslash, or write them between """ and """.'
# What Ollama's and llama.cpp's users type.
_ALSO = {"bye": "quit", "exit": "quit", "clear": "reset", "regen": "regenerate", "?": "help"}
_FULL = "the context is full: '/forget N' forgets the oldest N turns, '/reset' all of them."


class _Message(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str


class Answer:
    """What is noted of an answer while it comes.

    Attributes:
        num_tokens: so far.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._first = self._last = 0.0

    def note(self, num_tokens: int, finish_reason: str | None) -> None:
        """There are so many tokens now."""
        if num_tokens > self.num_tokens:
            self._last = time.perf_counter()
            self._first = self._first or self._last
        self.num_tokens, self.finish_reason = num_tokens, finish_reason or self.finish_reason

    def speed(self) -> str:
        """In words; one token has no speed."""
        seconds = self._last - self._first
        rate = f", {(self.num_tokens - 1) / seconds:.1f} tokens/s" if seconds > 0 else ""
        return f"{self.num_tokens} tokens{rate}"


Answerer = Callable[[Messages, Answer], Generator[str, None, None]]  # gives the answer piece by piece, and notes it


class Talk:
    """A conversation, and who is asked.

    Attributes:
        turns: messages of user and assistant in turn, without the instructions.
        given: the sampling parameters, which `/set` changes for the answerer, too.
    """

    def __init__(self, answerer: Answerer, given: dict[str, Any], keyboard: Keyboard, system: str) -> None:
        self.turns: Messages = []
        self.given, self._instructions, self._answerer, self._keyboard = given, system, answerer, keyboard
        self._forgets: bool | None = None  # the oldest turns, when the context is full; None: not asked yet

    def run(self) -> None:
        """Talk until the input ends."""
        for text in self._keyboard:
            with refusals_shown(self._keyboard.interactive):
                command = re.fullmatch(r"/([a-z]+|\?)(?: +(.*))?", text)  # a path is none
                name = None if command is None else _ALSO.get(command[1], command[1])
                if command is None:
                    self.ask(text)
                elif name == "quit":
                    return
                elif name in COMMANDS:
                    COMMANDS[name](self, (command[2] or "").strip())
                else:
                    print(f"There is no command /{name}. /help lists them.")

    def ask(self, question: str) -> None:
        """Show the answer to a question; both stay in the conversation if there is one."""
        asked, keyboard = _message("user", question), self._keyboard
        while True:
            answer = Answer()
            try:
                text = show(self._answerer(self._told() + asked, answer), keyboard.interactive, keyboard.styled)
                break
            except InvalidRequestError as error:
                if not keyboard.interactive or not is_about_context(error):
                    raise
                if not self._make_room():
                    raise InvalidRequestError(_FULL if self.turns else f"the question is too long: {error}") from None
        self.turns += asked + _message("assistant", text)
        if keyboard.interactive:
            cut = "; cut: max_tokens or the end of the context is reached" if answer.finish_reason == "length" else ""
            print(f"[{answer.speed()}{cut}]")

    def _make_room(self) -> bool:
        """Forget the older half of the turns where the user has agreed to that, who is asked once."""
        if not self.turns:
            return False
        if self._forgets is None:
            question = "The context is full. Forget the oldest turns, now and whenever it is?"
            self._forgets = self._keyboard.confirm(question)
        if self._forgets:
            self.do_forget(str(math.ceil(len(self.turns) / 4)))
        return self._forgets

    def _told(self) -> Messages:
        """All that an answer depends on."""
        return (_message("system", self._instructions) if self._instructions else []) + self.turns

    def do_help(self, _: str) -> None:
        """: shows this."""
        print(commands_help())

    def do_regenerate(self, _: str) -> None:
        """: asks the last question again, for another answer."""
        self.do_edit(self._last_question())

    def do_edit(self, text: str) -> None:
        """[TEXT]: asks another question in the place of the last one."""
        question = self._last_question()
        text = text or self._keyboard.read(default=question) or question
        turns, self.turns = self.turns, self.turns[:-2]
        try:
            self.ask(text)
        except QuireError:
            self.turns = turns
            raise

    def _last_question(self) -> str:
        if not self.turns:
            raise InvalidRequestError("there is no question yet.")
        return self.turns[-2]["content"]

    def do_set(self, text: str) -> None:
        """[NAME [VALUE]]: changes a sampling parameter, such as temperature 0.7, or shows them."""
        name, _, value = text.removeprefix("parameter ").partition(" ")  # as Ollama has it
        if name:
            session.set_parameter(self.given, name, value.strip())
        print(", ".join(f"{name} = {value!r}" for name, value in self.given.items()) or "All is as the model has it.")

    def do_system(self, text: str) -> None:
        """[TEXT]: changes the instructions, or shows them; the conversation stays."""
        self._instructions = text or self._instructions
        print(f"Instructions: {self._instructions or 'none'}")

    def do_save(self, name: str) -> None:
        """FILE: writes the conversation to a file."""
        messages = self._told()
        write_text(name, "/save", json.dumps(messages, indent=2, ensure_ascii=False) + "\n")
        print(f"Saved {len(messages)} messages.")

    def do_load(self, name: str) -> None:
        """FILE: goes on with a conversation that was saved."""
        messages = decode_record(read_text(name, "/load"), list[_Message], f"/load {name}")
        told = [each.content for each in messages if each.role == "system"]
        turns = [each for each in messages if each.role != "system"]
        if [each.role for each in turns] != ["user", "assistant"] * (len(turns) // 2):
            raise InvalidRequestError(f"{name} does not hold questions and answers in turn.")
        self._instructions, self.turns = "\n".join(told), msgspec.to_builtins(turns)
        print(f"Loaded {len(messages)} messages.")

    def do_forget(self, text: str) -> None:
        """[N]: forgets the oldest N questions and their answers; one, without N."""
        if (count := decimal(text or "1")) is None:
            raise InvalidRequestError(f"how many are {text!r:.80}?")
        num_turns = len(self.turns) // 2
        self.turns = self.turns[2 * count :]
        print(f"[forgot the oldest {min(count, num_turns)} of {num_turns} turns]")

    def do_reset(self, _: str) -> None:
        """: forgets the conversation; the instructions stay."""
        self.turns = []
        print("The conversation is forgotten.")

    def do_quit(self, _: str) -> None:
        """: leaves, as Ctrl-D does."""


def is_about_context(error: InvalidRequestError) -> bool:
    """Whether a request was refused as longer than the context, by an engine here or any server."""
    return re.search(r"context (length|size|window)", str(error)) is not None


COMMANDS = {name.removeprefix("do_"): each for name, each in vars(Talk).items() if name.startswith("do_")}


def commands_help() -> str:
    """A line for each command, and how to write several lines."""
    rows = [(name, *(each.__doc__ or "").split(": ", 1)) for name, each in COMMANDS.items()]
    return "\n".join(f"  {f'/{name} {argument}':24}{text}" for name, argument, text in rows) + f"\n{_INPUT_HELP}"


def _message(role: str, content: str) -> Messages:
    return [{"role": role, "content": content}]
