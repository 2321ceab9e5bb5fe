"""Llama 4's and others' format: a list of Python calls with keyword arguments, as `[search(query="x", limit=3)]`.

Only the names of tools on offer make a call; each argument is sent when it is complete.
"""

import ast
import json
from typing import Any

from quire.entrypoints.server.parsers.calls import ArgumentWriter, whole_or_marked
from quire.entrypoints.server.parsers.forms import Form, Frame, keyword_call
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reader, Script, WrongCallError

_START, _END = "<|python_start|>", "<|python_end|>"
_MAX_ARGUMENT = 1 << 16  # characters
_OPENS, _CLOSES = "([{", ")]}"
_JSON_NAMES = {"true": True, "false": False, "null": None}


def _calls(read: Reader) -> Script[None]:
    yield from read.literal("[", spaced=True)
    while True:
        yield from read.space()
        name, _ = yield from read.until("(", most=MAX_NAME)
        if name.strip() not in read.functions:
            raise WrongCallError
        read.is_sure = True
        argument = yield from _argument(read)
        writer = ArgumentWriter(read, name.strip())
        while argument is not None:
            key, value, last = argument
            writer.pair(key, value)
            argument = (yield from _argument(read)) if last == "," else None
        writer.close()
        if (yield from read.one_of(",", spaced=True)) is None:
            break
    yield from read.literal("]")
    yield from read.one_of(_END, spaced=True)


_Argument = tuple[str, Any, str]  # its name, its value, and what ends it


def _argument(read: Reader) -> Script[_Argument | None]:
    """One argument; None where there is no more."""
    if (yield from read.one_of(")", spaced=True)):
        return None
    key, _ = yield from read.until("=", most=MAX_NAME)
    text, last = yield from _expression(read)
    try:
        return key.strip(), _value(text), last
    except WrongCallError:
        read.put_back(f"{key}={text}{last}")
        raise


def _expression(read: Reader) -> Script[tuple[str, str]]:
    """Python up to the comma or bracket that ends it, and that."""
    taken, quote, depth = list[str](), "", 0
    while len(taken) < _MAX_ARGUMENT:
        char = yield from read.character()
        if quote:
            if char == "\\":
                taken.append(char)
                char = yield from read.character()
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in _OPENS:
            depth += 1
        elif depth and char in _CLOSES:
            depth -= 1
        elif not depth and char in ",)":
            return "".join(taken), char
        taken.append(char)
    raise WrongCallError


def _value(text: str) -> Any:
    """A Python literal that JSON has, too; JSON's names pass."""
    try:
        value = ast.literal_eval(_JSONNames().visit(ast.parse(text.strip(), mode="eval")))
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise WrongCallError from None
    return value


class _JSONNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


_FRAME = Frame("", keyword_call(), before="[", between=", ", after="]")
FORM = Form(whole_or_marked(_START, _calls), _FRAME, marks=(_START, _END))
