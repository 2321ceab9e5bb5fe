"""Structural tags as grammars: free text in which some parts, begun by a tag, have a form of their own.

`source` calls it. The formats are xgrammar's, of which the older one (structures and triggers) is a special case.
Special tokens within a text stand for themselves; all else is what the tokenizer makes of it.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import InvalidRequestError
from quire.text.grammars.gbnf import lark_of, place
from quire.text.grammars.lark import ANY_TEXT, Lark

MAX_DEPTH = 30


def lark_of_tag(tag: Any, prepare: Callable[[Any], Any], special_tokens: Mapping[str, int]) -> str:
    """llguidance's grammars of a structural tag.

    Args:
        prepare: checks a JSON schema and gives it its options.
        special_tokens: as in `source_of`.

    Raises:
        InvalidRequestError: an unknown format, or one without what it needs.
    """
    lark = Lark(special_tokens)
    writer = FormatWriter(lark, prepare)
    lark.rules.append(f"start: {writer.write(format_in(tag))}")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lark.rules)}, *writer.grammars]})


def format_in(tag: Any) -> Any:
    """The format of a structural tag, or what one of the older form stands for.

    Raises:
        InvalidRequestError: it is neither.
    """
    if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequestError('a structural tag is {"type": "structural_tag", "format": {...}}.')
    if (format := tag.get("format")) is not None:
        return format
    triggers, structures = _of(tag, "triggers", list), map(_checked, _of(tag, "structures", list))
    tags = [{**one, "content": {"type": "json_schema", "json_schema": one.get("schema")}} for one in structures]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def regex_as_lark(text: str) -> str:
    """A regex as a part of a rule.

    Raises:
        InvalidRequestError: it would take in what comes after it.
    """
    import llguidance

    if len(text) - len(text.rstrip("\\")) & 1:
        raise InvalidRequestError(f"{place(text, len(text) - 1)}: nothing comes after the last backslash.")
    return f"/{llguidance.regex_to_lark(text)}/"


class FormatWriter:
    """Writes formats into a grammar; what `write` and the others return is an expression that refers to its rules.

    Attributes:
        grammars: those that the formats hold, which the grammar refers to.
    """

    def __init__(self, lark: Lark, prepare: Callable[[Any], Any]) -> None:
        """`prepare`: as in `lark_of_tag`."""
        self.grammars: list[dict[str, str]] = []
        self._lark, self._depth = lark, 0
        self._kinds: dict[Any, Callable[[Any], str]] = {
            "const_string": lambda format: lark.text(_of(format, "value", str)),
            "any_text": lambda format: lark.rule(ANY_TEXT),
            "regex": lambda format: lark.rule(regex_as_lark(_of(format, "pattern", str))),
            "grammar": lambda format: self._grammar(lark_of(_of(format, "grammar", str))),
            "json_schema": lambda format: lark.rule(f"%json {json.dumps(prepare(format.get('json_schema')))}"),
            "sequence": lambda format: self._sequence(_of(format, "elements", list)),
            "or": lambda format: lark.rule(" | ".join(map(self.write, _some(format, "elements")))),
            "tag": lambda format: self._tag(format, ""),
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def write(self, format: Any) -> str:
        """Of any format."""
        kind = _checked(format).get("type")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InvalidRequestError(f"the structural tag is nested deeper than {MAX_DEPTH} levels.")
        if not isinstance(kind, str) or kind not in self._kinds:
            *known, last = self._kinds
            known = f"{', '.join(known)} and {last}"
            raise InvalidRequestError(f"a structural tag has a format of type {kind!r}; there are {known}.")
        written = self._kinds[kind](format)
        self._depth -= 1
        return written

    def _grammar(self, text: str) -> str:
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def _sequence(self, elements: list[Any]) -> str:
        written: list[str] = []
        rest = iter(elements)
        for element in rest:
            follows = next(rest, None) if _is_free(element) else None  # written with the text before it
            written.append(self.write(element) if follows is None else self._after_text(follows))
        return self._lark.rule(" ".join(filter(None, written)))

    def _after_text(self, format: Any) -> str:
        """Free text, and then a format that begins with a text of its own."""
        match _checked(format).get("type"):
            case "const_string":
                return self._lark.until(_of(format, "value", str))
            case "tag" if _of(format, "begin", str):
                return f"{self._lark.until(format['begin'])} {self._tag(format, format['begin'])}"
        rule = "any_text is followed by a const_string or a tag with a begin, or ends it"
        raise InvalidRequestError(f"in a structural tag, {rule}.")

    def _tag(self, tag: Any, written: str) -> str:
        """A tag of whose begin a part is written already."""
        begin, end, content = _of(tag, "begin", str), _of(tag, "end", str), _checked(tag.get("content"))
        begin = self._lark.text(begin[len(written) :])
        if _is_free(content) and end:
            return self._lark.rule(f"{begin} {self._lark.until(end)}")
        return self._lark.rule(f"{begin} {self.write(content)} {self._lark.text(end)}")

    def _triggered(self, format: Any) -> str:
        triggers, tags = _some(format, "triggers"), _some(format, "tags")
        by_trigger: dict[str, list[Any]] = {}
        for tag in tags:
            begin = _of(_checked(tag), "begin", str)
            fitting = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
            if not fitting:
                raise InvalidRequestError(f"no trigger of the structural tag begins its tag {begin[:80]!r}.")
            by_trigger.setdefault(max(fitting, key=len), []).append(tag)
        rests = {t: self._lark.rule(" | ".join(self._tag(tag, t) for tag in tags)) for t, tags in by_trigger.items()}
        at_once = self._lark.rule(" | ".join(f"{self._lark.text(t)} {rest}" for t, rest in rests.items()))
        in_text = self._lark.rule(" | ".join(f"{self._lark.until(t)} {rest}" for t, rest in rests.items()))
        free = self._lark.rule(ANY_TEXT)
        if format.get("stop_after_first"):
            return at_once if format.get("at_least_one") else self._lark.rule(f"{in_text} | {free}")
        return self._lark.rule(f"{at_once if format.get('at_least_one') else ''} {in_text}* {free}")

    def _separated(self, format: Any) -> str:
        tags = self._lark.rule(" | ".join(self.write(tag) for tag in _some(format, "tags")))
        more = "" if format.get("stop_after_first") else f"({self._lark.text(_of(format, 'separator', str))} {tags})*"
        return self._lark.rule(f"{tags} {more}" if format.get("at_least_one") else f"({tags} {more})?")


def _is_free(format: Any) -> bool:
    return isinstance(format, dict) and format.get("type") == "any_text"


def _checked(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"a structural tag holds {repr(value)[:80]} where a format should be, an object.")
    return value


def _of(format: Any, key: str, kind: type) -> Any:
    value = _checked(format).get(key)
    if not isinstance(value, kind):
        raise InvalidRequestError(f"a structural tag lacks {key!r}, or it is no {kind.__name__}: {repr(value)[:80]}.")
    return value


def _some(format: Any, key: str) -> list[Any]:
    value = _of(format, key, list)
    if not value:
        raise InvalidRequestError(f"a structural tag has no {key}; give at least one.")
    return value
