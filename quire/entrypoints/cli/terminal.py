"""What the user types, and how a text is shown while it comes: for `quire chat` and `quire complete`.

With prompt_toolkit and rich (the extra "chat"), at a terminal that allows it, lines are edited over several
lines, kept for the next run, and Markdown is rendered; else readline and plain text do. Knows nothing of conversations.
"""

import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, EngineDeadError, QuireError

_BLOCK = '"""'
# What could move the cursor or change the terminal: escape sequences are the terminal's business, not a model's.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class Keyboard:
    """Texts of the user: lines, pasted text, lines that a backslash joins, and blocks between triple quotes.

    Attributes:
        interactive: a person types, who is prompted; not a file or a pipe.
        styled: prompt_toolkit and rich are used: wanted, both ends are a terminal, and they are there.
        lacks: they would be used, but are not installed.
    """

    def __init__(self, interactive: bool, hint: str, styled: bool = False) -> None:
        """`hint` is shown at a Ctrl-C."""
        self.interactive, self._hint, self._session = interactive, hint, None
        wanted = interactive and styled and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (gives `input` its line editing)
        if wanted:
            with suppress(ImportError):
                import rich.markdown  # noqa: F401

                self._session = _prompt_session()
        self.styled, self.lacks = self._session is not None, wanted and self._session is None

    def __iter__(self) -> Iterator[str]:
        return iter(self.read, None)

    def read(self, default: str = "") -> str | None:
        """The next text that is not empty, None at the end; `default` is there to be edited, where it can be."""
        while True:
            try:
                if text := self._read(default).strip():
                    return text
            except EOFError:
                print(end="\n" if self.interactive else "")
                return None
            except UnicodeDecodeError:
                raise ConfigError("standard input is not UTF-8 text.") from None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print(f"\n{self._hint}")

    def confirm(self, question: str) -> bool:
        """Whether the user says yes, or just Enter."""
        with suppress(EOFError, KeyboardInterrupt):
            return input(f"{question} [Y/n] ").strip().lower() in ("", "y", "yes")
        return False

    def _read(self, default: str) -> str:
        if self._session is not None:
            return unblocked(self._session.prompt("\n> ", default=default))
        text = self._line("\n> ")
        with suppress(EOFError):  # in an open block: it ends there
            while is_open(text):
                text += "\n" + self._line(". ")
        return unblocked(text)

    def _line(self, prompt: str) -> str:
        return input(prompt if self.interactive else "")


def is_open(text: str) -> bool:
    """Whether a text goes on in the next line: a block is not closed, or its last line ends in a backslash."""
    return text.count(_BLOCK) == 1 if text.lstrip().startswith(_BLOCK) else text.endswith("\\")


def unblocked(text: str) -> str:
    """A text without the marks that made it one."""
    if text.lstrip().startswith(_BLOCK):
        return text.strip().removeprefix(_BLOCK).removesuffix(_BLOCK)
    return text.replace("\\\n", "\n")


def _prompt_session() -> Any:
    """A prompt over several lines, which Enter ends unless a block is open, and Alt-Enter goes on with."""
    from prompt_toolkit import PromptSession  # pyright: ignore[reportMissingImports]
    from prompt_toolkit.history import FileHistory  # pyright: ignore[reportMissingImports]
    from prompt_toolkit.key_binding import KeyBindings  # pyright: ignore[reportMissingImports]

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        buffer.insert_text("\n") if is_open(buffer.text) else buffer.validate_and_handle()

    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    path = Path(os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state"), "quire", "history")
    history = None
    with suppress(OSError):  # then this run's will do
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.open("ab").close()
        history = FileHistory(path)
    return PromptSession(history=history, key_bindings=keys, multiline=True)


def show(pieces: Generator[str, None, None], interactive: bool, styled: bool = False) -> str:
    """Print the pieces of a text as they come, and return it; at a terminal, Ctrl-C ends it there.

    `styled`: as Markdown, a paragraph or a block of code at a time, of which the one under way is shown as it is.
    """
    shown: list[str] = []
    stopped = ""
    with closing(pieces), _markdown() if styled else nullcontext(_write) as write:
        try:
            for piece in pieces:
                shown.append(piece)
                write(piece)
        except KeyboardInterrupt:
            if not interactive:
                raise
            stopped = " [stopped]"
    print(stopped, flush=True)
    return "".join(shown)


def _write(piece: str) -> None:
    print(piece.translate(_CONTROLS) if sys.stdout.isatty() else piece, end="", flush=True)


@contextmanager
def _markdown() -> Iterator[Callable[[str], None]]:
    """Gives a function that takes a text in pieces."""
    from rich.console import Console
    from rich.live import Live
    from rich.markdown import Markdown
    from rich.text import Text

    console, rest = Console(), ""
    with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:

        def write(piece: str) -> None:
            nonlocal rest
            rest += piece.translate(_CONTROLS)
            if end := finished_blocks(rest):
                console.print(Markdown(rest[:end]), end="\n\n")
                rest = rest[end:]
            # A taller part could not be taken back from the screen.
            live.update(Text("\n".join(rest.split("\n")[-(console.height // 2) :])), refresh=True)

        try:
            yield write
        finally:
            live.update(Text(""), refresh=True)
    console.print(Markdown(rest), end="")


def finished_blocks(text: str) -> int:
    """How many characters of a Markdown text are whole blocks, which nothing that follows can change."""
    fence, blank, end, position = "", False, 0, 0
    for line in text.splitlines(keepends=True):
        mark = re.match(r"`{3,}|~{3,}", line.strip())
        if blank and not fence and not line[0].isspace():  # an indented line belongs to a list above it
            end = position
        if fence:
            blank = line.strip().startswith(fence)
            fence = "" if blank else fence
        else:
            fence, blank = mark[0] if mark else "", not line.strip()
        position += len(line)
    return end


@contextmanager
def refusals_shown(interactive: bool) -> Iterator[None]:
    """Within, a request that fails is reported and no more, at a terminal; elsewhere it ends the command."""
    try:
        yield
    except QuireError as error:
        if not interactive or isinstance(error, EngineDeadError):
            raise
        print(f"error: {error}", file=sys.stderr)
