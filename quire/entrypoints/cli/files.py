"""Files that subcommands read and write; an error names the flag that the file came by."""

import json
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.errors import ConfigError

_Record = TypeVar("_Record")


def read_text(path: str, flag: str = "") -> str:
    """The text of a file, or of standard input ("-"); a ConfigError says why it can't be read."""
    name = "standard input" if path == "-" else f"{flag} {path}"
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text.") from None


def decode_record(line: str, of_type: type[_Record], name: str) -> _Record:
    """A line of a .jsonl file; `name` says which, for the ConfigError of one that is not understood."""
    try:
        return msgspec.json.decode(line, type=of_type)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name}: {error}.") from None


class _Prompt(msgspec.Struct):
    prompt: str | list[int]
    max_tokens: int | None = None


def read_prompts(path: str, flag: str, count: int | None, max_tokens: int) -> list[tuple[str | list[int], int]]:
    """The first `count` prompts of a file, with the number of tokens to generate for each.

    A .jsonl file holds `{"prompt": ..., "max_tokens": ...}` a line, any other a prompt a line; `max_tokens` is for
    those that do not say.

    Raises:
        ConfigError: the file can't be read, a line is not understood, or there is none.
    """
    lines = [line for line in read_text(path, flag).splitlines() if line.strip()][:count]
    if not lines:
        raise ConfigError(f"{flag} {path} holds no prompt.")
    if not path.endswith(".jsonl"):
        return [(line, max_tokens) for line in lines]
    records = [decode_record(line, _Prompt, f"{flag} {path}, record {n}") for n, line in enumerate(lines, start=1)]
    return [(record.prompt, record.max_tokens or max_tokens) for record in records]


class OutputFile(str):
    """A flag's value: the path of a file that is written when the work is done; one that can't be is refused before."""

    def __new__(cls, path: str) -> "OutputFile":
        existed = os.path.exists(path)  # pathlib's raises where it can't look
        try:
            with open(path, "ab"):
                pass
        except OSError as error:
            raise ArgumentTypeError(f"{path}: {error.strerror}") from None
        if not existed:
            os.unlink(path)
        return super().__new__(cls, path)


def write_text(path: str, flag: str, text: str) -> None:
    """Write a file; a ConfigError says why it can't be."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}.") from None


def write_figures(path: str | None, figures: Mapping[str, Any]) -> None:
    """Write the file of `--output-json`, if there is to be one."""
    if path is not None:
        write_text(path, "--output-json", json.dumps(figures, indent=4) + "\n")
