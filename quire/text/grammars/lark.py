"""Writes grammars in llguidance's form of Lark, piece by piece: texts, JSON by schema, text up to a mark.

Structural tags (`tags`) are written with it, and by the server the formats of tool calls. Marks that are tokens of
their own are written as tokens, because text does not match those.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.text.grammars.reasons import OURS
from quire.text.grammars.schema import narrowed

ANY_TEXT = "/(?s:.*)/"
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """A grammar that is being written. What its methods return are expressions, to be joined by spaces."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens`: marks that are tokens, with their ids."""
        self.tokens = tokens
        self.opened = ""  # a beginning that texts are written without, as it stands there already
        marks = "|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True)))
        self._mark = re.compile(f"({marks or '(?!)'})")  # without marks: what is nowhere
        self.rules: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """A rule of its own."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def text(self, text: str) -> str:
        """Just this text."""
        return self._literal(text.removeprefix(self.opened))

    def until(self, end: str) -> str:
        """Any text up to this one, which is part of it."""
        text = self._mark.split(end, 1)[0]  # no free text has a mark
        free = self.rule(f"{ANY_TEXT} {_quoted(text)}", "[lazy]") if text else ANY_TEXT
        return f"{free} {self._literal(end[len(text) :])}".strip()

    def few_tokens(self, most: int, end: str, never: Collection[int]) -> str:
        """At most so many tokens, and then this text, which begins with a token; others can `never` come before it."""
        found = self._mark.match(end)
        assert found is not None, "tokens can be counted up to one that ends them"
        others = ",".join(map(str, sorted({self.tokens[found[0]], *never})))
        return f"<[^{others}]>{{0,{most}}} {self.text(end)}" if most else self.text(end)

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that obeys a schema, spaced as chat templates write it.

        Raises:
            InvalidRequestError: it can't be held; a part of a larger one may refer to what it is without.
        """
        return self.rule(f"%json {json.dumps({**narrowed(schema), 'x-guidance': _SPACING})}")

    def series(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Items in this order, with a separator between them; each may be left out unless it says that it is needed."""
        between = f"{_quoted(separator)} " if separator else ""
        following = first = ""
        for expression, needed in reversed(items):
            begins = f"{expression} {following}".strip()
            choice = " | ".join(filter(None, [begins, first])) + ("" if first else " | ")
            first = begins if needed else self.rule(choice)
            body = f"{between}{expression}" if needed else f"({between}{expression})?"
            following = self.rule(f"{body} {following}".strip())
        return first

    def grammar(self, start: str) -> str:
        """All of it."""
        return OURS + "\n".join(["%llguidance {}", f"start: {start}", *self.rules]) + "\n"

    def _literal(self, text: str) -> str:
        parts = self._mark.split(text)
        return " ".join(f"<[{self.tokens[part]}]>" if n % 2 else _quoted(part) for n, part in enumerate(parts) if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
