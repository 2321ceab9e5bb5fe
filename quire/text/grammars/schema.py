"""JSON schemas before they are compiled: what no grammar here can hold is refused by name, with its place.

`source` calls it. llguidance refuses most of what it can't do, but without the place; it leaves out keywords of old
drafts without a word, and makes grammars without end of schemas that no finite value satisfies.
"""

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import unquote

from quire.errors import InvalidRequestError
from quire.structured_outputs import StructuredOutputsParams

MAX_DEPTH = 100
MAX_WORDS = 1000  # that are no keywords: so many are looked at for what was meant
MAX_TESTS = 10**6  # of subschemas that refer to each other, whether a finite value satisfies them
# What grammars don't hold; "$id" and anchors only name places.
_UNSUPPORTED = frozenset(
    ("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames")
    + ("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties")
    + ("$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy", "x-guidance")
    # Of other vocabularies: JSON Type Definition's, and those of validators that have more than the standard.
    + ("optionalProperties", "elements", "bsonType", "$data", "$merge", "$patch", "formatMinimum", "formatMaximum")
    + ("formatExclusiveMinimum", "formatExclusiveMaximum", "patternRequired", "allRequired", "anyRequired")
    + ("oneRequired", "uniqueItemProperties", "regexp", "range", "exclusiveRange")
)
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_ONE = ("items", "additionalProperties", "additionalItems")
_SOME = 3  # unsupported keywords that are named at most
# What says nothing, though its keyword may say something: zod writes the first of each record.
_EMPTY: list[tuple[str, Any]] = [("propertyNames", {"type": "string"}), ("propertyNames", {}), ("uniqueItems", False)]
# Those that are held, and those that say nothing of a value.
_HELD = frozenset(
    (*_OF_NAMES, *_OF_LISTS, *_OF_ONE, "type", "enum", "const", "required", "minProperties", "maxProperties")
    + ("minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "multipleOf")
    + ("exclusiveMinimum", "exclusiveMaximum", "$ref", "$anchor", "$id", "$schema")
)
_NOTES = frozenset(
    ("title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly", "id")
    + ("contentEncoding", "contentMediaType", "contentSchema", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor")
    + ("nullable", "discriminator", "xml", "externalDocs")
)
_KNOWN = _HELD | _UNSUPPORTED | _NOTES
# Those that llguidance knows for such; any other beside a $ref stands for something more that is to be held.
_LEFT = _HELD | _UNSUPPORTED | {"title", "description", "default"}
# What else people write for them.
_MEANT = {"min": "minimum", "max": "maximum", "minlen": "minLength", "maxlen": "maxLength", "minsize": "minItems",
          "maxsize": "maxItems", "property": "properties", "regex": "pattern", "values": "enum", "choices": "enum",
          "enumeration": "enum", "datatype": "type"}  # fmt: skip

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# What the keywords' values are: in words, and what says whether one is.
_RULES: list[tuple[tuple[str, ...], str, Callable[[Any], bool]]] = [
    (_OF_NAMES, "an object of schemas", lambda v: isinstance(v, dict) and all(map(_is_schema, v.values()))),
    (_OF_LISTS, "a list of schemas", lambda v: isinstance(v, list) and all(map(_is_schema, v))),
    (_OF_ONE, "a schema", lambda v: all(map(_is_schema, v)) if isinstance(v, list) else _is_schema(v)),
    (_COUNTS, "a count", lambda v: type(v) in (int, float) and v >= 0 and v == int(v)),
    (("minimum", "maximum"), "a number", lambda v: type(v) in (int, float)),
    (("exclusiveMinimum", "exclusiveMaximum"), "a number", lambda v: type(v) in (int, float, bool)),  # bool: draft 4
    (("multipleOf",), "a number above 0", lambda v: type(v) in (int, float) and v > 0),
    (("enum",), "a list", lambda v: isinstance(v, list)),
    (("required",), "a list of names", lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v)),
    (("pattern", "format", "$ref", "$anchor", "$id", "$schema"), "a text", lambda v: isinstance(v, str)),
    (("type",), f"of {', '.join(_TYPES)}, or a list of these",
     lambda v: all(kind in _TYPES for kind in (v if isinstance(v, list) else [v]))),
]  # fmt: skip
_CHECKS = {key: (rule, holds) for keys, rule, holds in _RULES for key in keys}

_Place = tuple[str, ...]


def check_schema(schema: Any, strict: bool = False) -> None:
    """Check a schema, keyword by keyword.

    Args:
        strict: no word may be there that is none of JSON Schema's, but for those with x- before them; else only none
            that looks like one that was misspelt, as the standard has it that all other words say nothing of a value.

    Raises:
        InvalidRequestError: a keyword that is unsupported, unknown, or has another value than it may; a reference to
            nothing; too deep; or no finite value satisfies it, or it takes too long to see whether one does.
    """
    if not _is_schema(schema):
        raise InvalidRequestError(f"a JSON schema must be an object, true or false, not {type(schema).__name__}.")
    used = ((place, key, part[key]) for place, part in _parts(schema) for key in part if key in _UNSUPPORTED)
    found = [(place, key) for place, key, value in used if (key, value) not in _EMPTY]
    if found:
        named = ", ".join(f"{key!r} at {_shown(place)}" for place, key in found[:_SOME])
        more = f" and {len(found) - _SOME} more" if len(found) > _SOME else ""
        remedy = "leave them out, and check the output for them yourself"
        message = f"the JSON schema has keywords that structured outputs don't support: {named}{more}; {remedy}."
        raise InvalidRequestError(message)
    _check_words(schema, strict)
    for place, part in _parts(schema):
        for key in part.keys() & _CHECKS.keys():
            rule, holds = _CHECKS[key]
            if not holds(part[key]):
                raise InvalidRequestError(f"{key!r} at {_shown(place)} must be {rule}; it is {part[key]!r:.80}.")
        for low, high in zip(("minimum", *_COUNTS[::2]), ("maximum", *_COUNTS[1::2]), strict=True):
            if low in part and high in part and part[low] > part[high]:
                raise InvalidRequestError(f"{low!r} at {_shown(place)} is above {high!r}; nothing obeys that.")
        for value in (part.get("const"), *_list(part, "enum")):
            if isinstance(value, int) and abs(value) > 2**53:  # llguidance would write what a float holds of it
                raise InvalidRequestError(f"{value} at {_shown(place)} is beyond 2**53; use a text, or a pattern.")
    _Values(schema).check()


def narrowed(schema: Any, strict: bool = False, everywhere: bool = False) -> Any:
    """Check a schema, and return it with no other properties for an object that names some, and says nothing of others.

    As vLLM and llama.cpp have it: weak models would go on with others for ever. What satisfies it satisfies the schema
    as it was, and where anything did, something still does: objects stay open where others are needed, and with all
    that is in them where several subschemas speak of one value, as those of an allOf, and may name different ones, or
    where one may not hold, as in a oneOf. What OpenAPI names as a oneOf's discriminator is needed, though a default may
    stand for it elsewhere: without it nothing says which option is meant.

    Args:
        strict: as in `check_schema`.
        everywhere: objects that say nothing of others have none at all, whatever that contradicts.

    Raises:
        InvalidRequestError: as `check_schema`.
    """
    check_schema(schema, strict)
    schema = json.loads(json.dumps(schema))
    values = _Values(schema)
    parts = values.reached([schema])
    pointers = {key for part in parts.values() for key in _keys(str(part.get("$ref")))}
    options = values.options(parts.values())
    inner = values.options(part for key, part in parts.items() if key in options)
    for part in parts.values():
        values.settle(part, pointers, inner)
    # Beside a word that it doesn't know, llguidance looks behind a $ref: a oneOf may need that; what leads back can't.
    is_any = not any("oneOf" in part for part in parts.values())
    for part in parts.values():
        for key in [key for key in part if (is_any and key not in _LEFT | pointers) or (key, part[key]) in _EMPTY]:
            del part[key]
    shared = values.reached(filter(_is_shared, parts.values()))
    for key, part in parts.items():
        is_object = part.get("type") == "object" or "properties" in part
        closes = (everywhere and is_object) or (key not in shared and _names_all(part))
        if closes and not part.keys() & {"additionalProperties", "patternProperties"}:
            part["additionalProperties"] = False
    return schema


def _check_words(schema: dict[str, Any], strict: bool) -> None:
    words = {key: place for place, part in _parts(schema) for key in part if key not in _KNOWN and key[:2] != "x-"}
    for key in [*words][:MAX_WORDS]:
        if (meant := _meant(key)) is not None or strict:
            remedy = f"did you mean {meant!r}?" if meant else "leave it out, or begin it with x-."
            raise InvalidRequestError(f"JSON Schema has no keyword {key!r}, at {_shown(words[key])}; {remedy}")


@lru_cache(MAX_WORDS)
def _meant(key: str) -> str | None:
    """The keyword that a word may be a misspelling of."""
    names = {name.lower().lstrip("$"): name for name in _HELD | _UNSUPPORTED if len(name) > 3}
    word = re.sub("[^a-z]", "", key.lower())
    found = get_close_matches(word, names, 1, 0.82) or [name for name in names if sorted(name) == sorted(word)]
    return names[found[0]] if found else _MEANT.get(word)


def place_of(params: StructuredOutputsParams, key: str, value: str | None) -> str:
    """ " at #/..." where a schema has a keyword, of this value if there is one given; "" if there is no such place."""
    parts = _parts(json.loads(params.json)) if isinstance(params.json, str) else ()
    return next((f" at {_shown(at)}" for at, part in parts if key in part and value in (None, part[key])), "")


def _parts(schema: dict[str, Any], known: Container[int] = ()) -> Iterator[tuple[_Place, dict[str, Any]]]:
    """Every subschema that is an object, and its place. Without recursion, as depth is what is checked.

    Args:
        known: ids of subschemas that are left out, with all that is within them.
    """
    stack: list[tuple[_Place, Any]] = [((), schema)]
    while stack:
        place, part = stack.pop()
        if not isinstance(part, dict) or id(part) in known:
            continue
        if len(place) > 2 * MAX_DEPTH:
            raise InvalidRequestError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels; make it flatter.")
        yield place, part
        for key in _OF_NAMES:
            if isinstance(named := part.get(key), dict):
                stack += [((*place, key, name), value) for name, value in named.items()]
        for key in (*_OF_LISTS, *_OF_ONE):
            value = part.get(key)
            if isinstance(value, list):
                stack += [((*place, key, str(number)), each) for number, each in enumerate(value)]
            else:
                stack.append(((*place, key), value))


class _Values:
    """Which subschemas some finite value satisfies. Each is tested again once one is found that it waits for."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root, self._parts = schema, dict(_parts(schema))
        self._named = {f"#{p['$anchor']}": p for p in self._parts.values() if isinstance(p.get("$anchor"), str)}
        self._named |= {part["$id"]: part for part in self._parts.values() if isinstance(part.get("$id"), str)}
        self._finite: set[int] = set()
        self._waiting: dict[int, list[dict[str, Any]]] = {}  # by the one that it waits for
        self._tested, self._num_tests = schema, 0

    def check(self) -> None:
        """Raise unless there is a value for the whole."""
        if not any("$ref" in part for part in self._parts.values()):
            return
        parts = list(self.reached([self._root]).values())
        while parts:  # from the leaves up: the last ones found lie deepest
            self._tested = part = parts.pop()
            if id(part) not in self._finite and self._ends(part):
                self._finite.add(id(part))
                parts += self._waiting.pop(id(part), ())
        if id(self._root) not in self._finite:
            raise InvalidRequestError(
                "the JSON schema refers to itself without an end, so that no finite value satisfies it; make one of "
                "the properties that lead back optional, or allow null there."
            )

    def reached(self, roots: Iterable[Any]) -> dict[int, dict[str, Any]]:
        """By their ids: subschemas, those within them, and those that they refer to."""
        found: dict[int, dict[str, Any]] = {}
        todo = [*roots]
        while todo:
            for _, part in _parts(todo.pop(), found):
                found[id(part)] = part
                todo += [self._target(ref)] if isinstance(ref := part.get("$ref"), str) else []
        return found

    def options(self, parts: Iterable[dict[str, Any]]) -> set[int]:
        """The ids of what is an option of these parts' oneOf, or speaks of the same value for one."""
        found, todo = set[int](), [one for part in parts for one in _list(part, "oneOf")]
        while todo:
            part = todo.pop()
            if isinstance(part, dict) and id(part) not in found:
                found.add(id(part))
                todo += _list(part, "anyOf") + _list(part, "oneOf") + _list(part, "allOf")
                todo += [self._target(ref)] if isinstance(ref := part.get("$ref"), str) else []
        return found

    def settle(self, part: dict[str, Any], pointers: set[str], inner: set[int]) -> None:
        """Make an anyOf of a oneOf whose options exclude each other, unless `pointers` of references lead through.

        A discriminator's property is needed, but by options of an `inner` oneOf: what they exclude others may take.
        """
        options, said = [self._option(one) for one in _list(part, "oneOf")], part.get("discriminator")
        is_free = bool(options) and inner.isdisjoint(map(id, options))
        tags = [str(said["propertyName"])] if is_free and isinstance(said, dict) and "propertyName" in said else []
        is_any = not ({"anyOf"} & part.keys() or {"oneOf"} & pointers) and self._exclude_each_other(options, tags)
        for one in (options if is_any else [part]) if tags else ():
            one["required"] = _list(one, "required") + tags
        if is_any:
            part["anyOf"] = part.pop("oneOf")

    def _option(self, option: Any) -> dict[str, Any]:
        """What it refers to, if it does nothing else; true, too, as what has no keyword."""
        if isinstance(option, dict) and option.keys() & _HELD == {"$ref"}:
            option = self._target(option["$ref"])
        return option if isinstance(option, dict) else {}

    def _exclude_each_other(self, options: list[dict[str, Any]], tags: list[str]) -> bool:
        """Whether llguidance sees that no value satisfies two of them; behind a reference it would not look."""
        import llguidance

        names = {str(name): None for name in chain(tags, *(_list(one, "required") for one in options))}
        self._num_tests += len(names) * len(options)
        if not options or self._num_tests > MAX_TESTS or len({*map(id, options)}) < len(options):
            return False
        text = json.dumps({"grammars": [{"json_schema": {"oneOf": [_outline(one, names, tags) for one in options]}}]})
        self._num_tests += 4 * len(text)  # as each is compared with each
        return self._num_tests <= MAX_TESTS and not llguidance.LLMatcher.validate_grammar(text)

    def _ok(self, part: Any) -> bool:
        self._num_tests += 1
        if self._num_tests > MAX_TESTS:
            raise InvalidRequestError("the JSON schema has too many parts that refer to each other; make it smaller.")
        if not isinstance(part, dict) or id(part) in self._finite:
            return True
        self._waiting.setdefault(id(part), []).append(self._tested)
        return False

    def _ends(self, part: dict[str, Any]) -> bool:
        needed = [self._target(ref)] if isinstance(ref := part.get("$ref"), str) else []
        if not all(map(self._ok, needed + _list(part, "allOf"))):
            return False
        if any(options and not any(map(self._ok, options)) for options in (_list(part, "anyOf"), _list(part, "oneOf"))):
            return False
        kinds = part.get("type")
        kinds = [kinds] if isinstance(kinds, str) else _list(part, "type")
        if part.keys() & {"enum", "const"} or not kinds or not {"object", "array"}.issuperset(map(str, kinds)):
            return True  # a value of another kind will do
        return ("object" in kinds and self._object_ends(part)) or ("array" in kinds and self._array_ends(part))

    def _object_ends(self, part: dict[str, Any]) -> bool:
        names = (name for name in _list(part, "required") if isinstance(name, str))
        return all(self._ok(_properties(part).get(name, part.get("additionalProperties"))) for name in names)

    def _array_ends(self, part: dict[str, Any]) -> bool:
        if not isinstance(least := part.get("minItems"), int) or least < 1:
            return True
        first = _list(part, "prefixItems") or _list(part, "items")
        return all(map(self._ok, first[:least])) and (least <= len(first) or self._ok(part.get("items")))

    def _target(self, ref: str) -> Any:
        """What a reference within the schema refers to."""
        target: Any = self._named.get(ref)
        if target is not None:
            return target
        if not ref.startswith("#"):
            reason = "is not within the JSON schema; references elsewhere are not followed"
            raise InvalidRequestError(f"$ref {ref!r} {reason}.")
        target = self._root if ref[:2] in ("#", "#/") else None
        for key in _keys(ref):
            try:
                target = target[int(key)] if isinstance(target, list) else target[key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise InvalidRequestError(f"$ref {ref!r} refers to nothing in the JSON schema.") from None
        return target


def _is_shared(part: dict[str, Any]) -> bool:
    """Whether several of the subschemas in it, or one and a constant, may speak of the same value."""
    held = part.keys() & _HELD - {"type", "$defs", "definitions", "$anchor", "$id", "$schema"}
    if held & {"$ref", "anyOf", "oneOf", "allOf"}:
        return len(held) > 1 or len(_list(part, "allOf")) > 1 or len(_list(part, "oneOf")) > 1
    return bool(held & {"enum", "const", "patternProperties"})


def _names_all(part: dict[str, Any]) -> bool:
    """Whether an object names properties, and needs no others."""
    names, needed = _properties(part), set(map(str, _list(part, "required")))
    return bool(names) and needed <= names.keys() and "minProperties" not in part


def _properties(part: dict[str, Any]) -> dict[str, Any]:
    value = part.get("properties")
    return value if isinstance(value, dict) else {}


def _outline(part: dict[str, Any], names: Iterable[Any], tags: Sequence[str] = ()) -> dict[str, Any]:
    """What tells a subschema from others: its type and constants, and those of some properties. It needs tags."""
    found = {str(name): _properties(part).get(str(name)) for name in names}
    told = {name: _outline(held, _list(held, "required")) for name, held in found.items() if isinstance(held, dict)}
    own = {key: part[key] for key in ("type", "const", "enum") if key in part}
    return own | {"properties": told, "required": [name for name in told if name in (*_list(part, "required"), *tags)]}


def _keys(ref: str) -> list[str]:
    """What the pointer of a reference leads through."""
    return [unquote(key).replace("~1", "/").replace("~0", "~") for key in ref.split("/")[1:]]


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _list(part: dict[str, Any], key: str) -> list[Any]:
    value = part.get(key)
    return value if isinstance(value, list) else []


def _shown(place: _Place) -> str:
    return "/".join(("#", *place)) if len("".join(place)) < 200 else "#/..." + place[-1][-100:]
