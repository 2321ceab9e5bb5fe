"""Files that subcommands read and write; an error names the flag that the file came by."""

import json
import os
import random
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.errors import ConfigError

_Record = TypeVar("_Record")


def read_text(path: str, flag: str = "", most: int = 2**30) -> str:
    """The text of a file, or of standard input ("-"); a ConfigError says why it can't be read.

    Args:
        most: characters, more than it may have, in units of 2**20: a device has no end.
    """
    name = "standard input" if path == "-" else f"{flag} {path}"
    try:
        with nullcontext(sys.stdin) if path == "-" else open(path, encoding="utf-8-sig") as file:
            # In pieces: what is asked for at once takes a buffer of that size at once.
            text = "".join(islice(iter(lambda: file.read(2**20), ""), most // 2**20))
            if len(text) < most:
                return text
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text.") from None
    raise ConfigError(f"{name} does not end within {most} characters.")


def decode_record(line: str, of_type: type[_Record], name: str) -> _Record:
    """A line of a .jsonl file; `name` says which, for the ConfigError of one that is not understood."""
    try:
        return msgspec.json.decode(line, type=of_type)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name}: {error}.") from None


class _Prompt(msgspec.Struct):
    prompt: str | list[int]
    max_tokens: int | None = None


class _Said(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Said] = []


def read_prompts(path: str, flag: str, count: int | None, max_tokens: int) -> list[tuple[Any, int]]:
    """The first `count` prompts of a file, texts or token ids, with the number of tokens to generate for each.

    A .jsonl file holds `{"prompt": ..., "max_tokens": ...}` a line, a .json file ShareGPT's conversations, any other a
    prompt a line; `max_tokens` is for those that do not say.

    Raises:
        ConfigError: the file can't be read, a line is not understood, or there is none.
    """
    text = read_text(path, flag)
    if path.endswith(".json"):
        prompts = _sharegpt(decode_record(text, list[_Conversation], f"{flag} {path}"))
    else:
        # Not splitlines: a record may have a U+2028 or the like in it.
        prompts = [(line, max_tokens) for line in text.split("\n") if line.strip()]
    if not (prompts := prompts[:count]):
        raise ConfigError(f"{flag} {path} holds no prompt.")
    if not path.endswith(".jsonl"):
        return prompts
    records = [decode_record(line, _Prompt, f"{flag} {path}, record {n}") for n, (line, _) in enumerate(prompts, 1)]
    return [(record.prompt, record.max_tokens or max_tokens) for record in records]


def _sharegpt(conversations: list[_Conversation]) -> list[tuple[Any, int]]:
    """Questions, in an order drawn once and for all, with the tokens of their replies, of four characters each.

    vLLM's benchmarks leave the same ones out, as too short or too long.
    """
    random.Random(0).shuffle(conversations)
    pairs = [each.conversations[:2] for each in conversations if len(each.conversations) > 1]
    sized = [(question.value, len(question.value) // 4, len(reply.value) // 4) for question, reply in pairs]
    return [(one, out) for one, num, out in sized if 4 <= num <= 1024 and out >= 4 and num + out <= 2048]


def user_path(text: str) -> Path:
    """A flag's value: a path, which may begin with ~."""
    if (path := os.path.expanduser(text)).startswith("~"):
        raise ArgumentTypeError(f"{text!r} is in a home that nobody has; give the whole path")
    return Path(path)


class OutputFile(str):
    """A flag's value: the path of a file that is written when the work is done; one that can't be is refused before.

    With `flag`, by a ConfigError that names it; without, by what argparse reports.
    """

    def __new__(cls, path: str, flag: str = "") -> "OutputFile":
        existed = os.path.exists(path)  # pathlib's raises where it can't look
        try:
            open(path, "ab").close()
        except OSError as error:
            reason = f"{path}: {error.strerror}"
            raise ConfigError(f"{flag} {reason}.") if flag else ArgumentTypeError(reason) from None
        if not existed:
            os.unlink(path)
        return super().__new__(cls, path)


class OutputFolder(str):
    """Likewise the path of a folder for such files, which is made where there is none."""

    def __new__(cls, path: str) -> "OutputFolder":
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise ArgumentTypeError(f"{path}: {error.strerror}") from None
        return super().__new__(cls, path)


def write_text(path: str, flag: str, text: str, mode: str = "w") -> None:
    """Write a file; a ConfigError says why it can't be."""
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}.") from None


def write_figures(path: str | None, figures: Mapping[str, Any], as_line: bool = False) -> None:
    """Write the file of what was measured, if there is to be one; `as_line`: as a line after those that it has."""
    if path is not None:
        text = json.dumps(figures, indent=None if as_line else 4)
        write_text(path, "the figures can't be written:", text + "\n", "a" if as_line else "w")
