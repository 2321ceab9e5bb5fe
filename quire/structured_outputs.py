"""What a request's output must look like: a JSON schema, a regex, one of several texts, a grammar, tags in free text.

Users build `StructuredOutputsParams`, `SamplingParams.structured_outputs` holds it, and the engine's `structured` room
makes a grammar of it. Here it is checked for form and size only, so that whatever is slow or deep is done off the loop.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.errors import InvalidRequestError, broken, require
from quire.utils.keywords import NamesUnknownKeywords
from quire.utils.values import strings

MAX_GRAMMAR_BYTES = 2**20  # of a schema, a grammar, a regex, or all choices together
MAX_CHOICES = 16384

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, metaclass=NamesUnknownKeywords, omit_defaults=True):
    """Exactly one constraint, and how it is meant. Fields are vLLM's. JSON that is given as an object becomes text.

    Raises:
        InvalidRequestError: (a ValueError) none or several constraints, or one that is of another form, or too large.
        UnknownParameterError: no such field; names the nearest.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None  # of the whole output
    choice: list[str] | None = None  # the output is one of these
    grammar: str | None = None  # Lark (as llguidance has it), or GBNF (`root ::= ...`)
    json_object: bool | None = None  # any JSON object
    # {"type": "structural_tag", "format": {...}}, as xgrammar has it; or with "structures" and "triggers", as it was.
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False  # JSON without any; else at most a space or an indented line at each place
    # No object of a schema has properties that it does not name, unless it says `additionalProperties`. Without this
    # that holds of objects that name some, and need no others, where no other part of the schema speaks of them.
    disable_additional_properties: bool = False
    strict: bool = False  # words in a schema that JSON Schema does not have are refused, whatever they look like
    whitespace_pattern: str | None = None  # a regex: what may stand between the tokens of JSON
    disable_fallback: bool = False  # of no effect: there is one engine of grammars

    def __post_init__(self) -> None:
        self.json_object = self.json_object or None
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            said = f"{len(given)} are given ({', '.join(given)})" if given else "none is given"
            one = "exactly one of json, regex, choice, grammar, json_object and structural_tag"
            raise InvalidRequestError(f"structured_outputs must have {one}; {said}.", "structured_outputs")
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                setattr(self, name, _json_text(name, getattr(self, name)))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None and (not isinstance(value, str) or not value):
                raise broken(f"structured_outputs.{name}", value, "a non-empty string")
        if self.choice is not None:
            self.choice = choices = strings("structured_outputs.choice", self.choice)
            rule = f"a list of 1 to {MAX_CHOICES} strings, not {len(choices)}"
            require(1 <= len(choices) <= MAX_CHOICES, "structured_outputs.choice", choices[:9], rule)
        for name, text in ((self.kind, self.constraint), ("whitespace_pattern", self.whitespace_pattern or "")):
            if re.search("[\ud800-\udfff]", text):
                raise broken(f"structured_outputs.{name}", text, "without lone surrogates (U+D800 to U+DFFF)")
        if (size := len(self.constraint.encode())) > MAX_GRAMMAR_BYTES:
            most = f"and {MAX_GRAMMAR_BYTES} is the most; send a smaller one"
            raise InvalidRequestError(f"structured_outputs.{self.kind} has {size} bytes, {most}.", "structured_outputs")

    @property
    def kind(self) -> str:
        """The constraint's name."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    @property
    def constraint(self) -> str:
        """The constraint as text."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class GuidedDecodingParams(StructuredOutputsParams):
    """vLLM's older name for the same."""

    backend: str | None = None  # of no effect: there is one


def _json_text(field: str, value: Any) -> str:
    """An object of JSON as text; a text as it is, once it is one."""
    if isinstance(value, bool | Mapping):
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise broken(f"structured_outputs.{field}", value, f"JSON ({error})") from None
    require(isinstance(value, str), f"structured_outputs.{field}", value, "a dict, or JSON text")
    if not value.lstrip().startswith(("{", "true", "false")):  # the rest of it is found out where it is compiled
        raise broken(f"structured_outputs.{field}", value, "a JSON object")
    return value
