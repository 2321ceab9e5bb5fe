"""Schemas are refused for what no grammar holds, by name and place; structural tags mean what they say."""

import gc
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import llguidance
import pydantic
import pytest

import quire
from quire.errors import InvalidRequestError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammars.compiler import Compiler, TooLongError, Vocabulary
from quire.text.grammars.compose import after
from quire.text.grammars.reasons import OURS
from quire.text.grammars.schema import check_schema, narrowed
from quire.text.grammars.trial import Trial
from quire.text.tokenizer import load_tokenizer

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}
GOOD: list[Any] = [
    True,
    {"type": "object", "properties": {"not": {"type": "string"}}},
    {"enum": [{"not": 1}]},
    {"$defs": {"n": {"anyOf": [NODE, {"type": "null"}]}}, "$ref": "#/$defs/n"},
    {"type": "array", "items": {"$ref": "#"}},
    {"tsType": "X", "enumNames": ["a"], "x-minLenght": 3, "propertyOrder": 1, "optional": True},
    {"units": "m", "order": 3, "minVersion": 1},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"$defs": {"a/b": {"type": "null"}}, "$ref": "#/$defs/a~1b"},
    {"$defs": {"n": {"type": ["object", "null"], "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
     "$ref": "#/$defs/n"},
    {"$ref": "#/components/schemas/n", "components": {"schemas": {"n": {"properties": {"n": {"$ref": "#"}}}}}},
    {"$defs": {"of": {"n": {"type": "array", "items": {"$ref": "#/$defs/of/n"}}}}, "$ref": "#/$defs/of/n"},
    {"items": {"$ref": "#/of/n"}, "of": {"n": {"type": [{}]}}},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    {"items": {}, "uniqueItems": False},
    {"minimum": 3, "maximum": 3},
    {"enum": [2**53, -(2**53), 1e30, True]},
]  # fmt: skip
BAD: list[tuple[Any, str]] = [
    (5, "not int"),
    ({"properties": {"a": {"items": [{"if": {}}]}}}, "'if' at #/properties/a/items/0"),
    ({"uniqueItems": True, "not": {}}, "'uniqueItems' at #, 'not' at #"),
    ({"x-guidance": {"lenient": True}}, "x-guidance"),
    ({"extends": {}}, "extends"),
    ({"$ref": "#"}, "without an end"),
    ({"$defs": {"n": NODE}, "$ref": "#/$defs/n"}, "without an end"),
    ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "without an end"),
    ({"allOf": [{"$ref": "#"}, {}]}, "without an end"),
    ({"$ref": "#/definitions/x"}, "refers to nothing"),
    ({"$ref": "other.json"}, "not within"),
    ({"$ref": "#/of/n", "of": {"n": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}}}, "without an end"),
    ({"$ref": "#/of/n", "of": {"n": {"properties": {"n": {"$ref": "#/of/x"}}}}}, "refers to nothing"),
    ({"propertes": {}}, "'propertes', at #; did you mean 'properties'"),
    ({"items": {"min_length": 3}}, "'min_length', at #/items; did you mean 'minLength'"),
    ({"propertys": {}}, "did you mean 'properties'"),
    ({"property": {}}, "did you mean 'properties'"),
    ({"tpye": "object"}, "did you mean 'type'"),
    ({"minLen": 3}, "did you mean 'minLength'"),
    ({"type": "integer", "max": 3}, "did you mean 'maximum'"),
    ({"optionalProperties": {}}, "don't support: 'optionalProperties' at #"),
    ({"items": {"minimum": "x"}}, "'minimum' at #/items must be a number; it is 'x'"),
    ({"minLength": True}, "'minLength' at # must be a count; it is True"),
    ({"maxItems": 1.5}, "'maxItems' at # must be a count"),
    ({"multipleOf": 0}, "'multipleOf' at # must be a number above 0"),
    ({"required": "a"}, "'required' at # must be a list of names; it is 'a'"),
    ({"properties": {"a": 3}}, "'properties' at # must be an object of schemas"),
    ({"anyOf": {}}, "'anyOf' at # must be a list of schemas"),
    ({"items": "a"}, "'items' at # must be a schema"),
    ({"type": ["string", {}]}, "'type' at # must be of array, boolean"),
    ({"enum": 3}, "'enum' at # must be a list"),
    ({"pattern": 3}, "'pattern' at # must be a text"),
    ({"format": "date", "formatMinimum": "2020-01-01"}, "'formatMinimum' at #"),
    ({"propertyNames": {"type": "string", "maxLength": 3}}, "'propertyNames' at #"),
    ({"uniqueItems": True}, "'uniqueItems' at #"),
    ({"properties": {"a": {"minimum": 5, "maximum": 3}}}, "'minimum' at #/properties/a is above 'maximum'"),
    ({"minLength": 5, "maxLength": 3}, "'minLength' at # is above 'maxLength'"),
    ({"$defs": {"a": {"minItems": 2, "maxItems": 1}}}, "'minItems' at #/\\$defs/a is above 'maxItems'"),
    ({"enum": ["a", 1234567890123456789]}, "1234567890123456789 at # is beyond 2\\*\\*53"),
    ({"items": {"const": -(2**53) - 1}}, "-9007199254740993 at #/items is beyond"),
]


@pytest.mark.parametrize("schema", GOOD, ids=json.dumps)
def test_what_can_be_held(schema: Any) -> None:
    check_schema(schema)


@pytest.mark.parametrize(("schema", "reason"), BAD, ids=lambda value: json.dumps(value)[:50])
def test_what_can_not(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        check_schema(schema)


def test_a_strict_schema_has_no_unknown_words() -> None:
    words = ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "x-any")
    check_schema(
        {"type": "object", "$schema": "https://json-schema.org/draft/2020-12/schema"} | dict.fromkeys(words), True
    )
    with pytest.raises(InvalidRequestError, match="no keyword 'tsType', at #/items; leave it out"):
        check_schema({"items": {"tsType": "X"}}, True)
    with pytest.raises(InvalidRequestError, match="did you mean 'maxItems'"):
        check_schema({"maxitems": 3}, True)


def test_many_words_that_are_no_keywords_are_not_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    monkeypatch.setattr("quire.text.grammars.schema._meant", looked_at.append)
    check_schema({f"word_{n}": n for n in range(5000)})
    assert len(looked_at) == 1000
    with pytest.raises(InvalidRequestError, match="no keyword 'word_"):
        check_schema({f"word_{n}": n for n in range(5000)}, True)


X, Y = {"type": "object", "properties": {"x": {}}}, {"type": "object", "properties": {"y": {}}, "required": ["y"]}
OPEN: list[Any] = [
    True,
    {"type": "object"},
    {"type": "object", "properties": {}},
    {"properties": {"a": {}}, "additionalProperties": True},
    {"properties": {"a": {}}, "additionalProperties": {"type": "null"}},
    {"properties": {"a": {}}, "patternProperties": {"^b": {}}},
    {"properties": {"a": {}}, "required": ["b"]},
    {"properties": {"a": {}}, "minProperties": 2},
    {"allOf": [X, Y]},
    {**X, "anyOf": [Y, {"required": ["x"]}]},
    {"oneOf": [X, Y]},
    {"$ref": "#/$defs/X", "required": ["z"], "$defs": {"X": X}},
    {"allOf": [{"$ref": "#/$defs/L"}, {"type": "array"}], "$defs": {"L": {"items": {"$ref": "#/$defs/X"}}, "X": X}},
    {"$ref": "#/x/X", "x": {"X": {"allOf": [{"$ref": "#/$defs/Y"}, X]}}, "$defs": {"Y": Y}},
    {"enum": [{"a": X}], "additionalProperties": X},
]


@pytest.mark.parametrize("schema", OPEN, ids=json.dumps)
def test_objects_that_stay_open(schema: Any) -> None:
    assert narrowed(schema) == schema


def test_objects_that_name_their_properties_are_closed() -> None:
    class Part(pydantic.BaseModel):
        name: Literal["a", "b"]
        more: "Part | None" = None

    class Whole(pydantic.BaseModel):
        parts: list[Part | int]
        counts: dict[str, int]
        anything: dict[str, Any] = {}

    schema = Whole.model_json_schema()
    closed = narrowed(schema)
    assert schema == Whole.model_json_schema()
    for part in (closed, closed["$defs"]["Part"]):
        assert part.pop("additionalProperties") is False
    assert closed == schema
    assert narrowed({"allOf": [X]}) == {"allOf": [{**X, "additionalProperties": False}]}
    beside = {"properties": {"a": X, "b": {"allOf": [X, Y]}}, "required": ["a"]}
    own = {**X, "additionalProperties": False}
    properties = {"a": own, "b": {"allOf": [X, Y]}}
    assert narrowed(beside) == {**beside, "properties": properties, "additionalProperties": False}


def test_all_objects_are_closed_on_demand() -> None:
    for schema in ({"type": "object"}, {"properties": {}}, {"properties": {"a": {}}, "required": ["b"]}):
        assert narrowed(schema, everywhere=True) == {**schema, "additionalProperties": False}
    both = narrowed({"allOf": [X, {"additionalProperties": True}]}, everywhere=True)
    assert both == {"allOf": [{**X, "additionalProperties": False}, {"additionalProperties": True}]}
    named = {"properties": {"default": X}, "additionalProperties": False}
    assert narrowed(named, everywhere=True)["properties"]["default"]["additionalProperties"] is False


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = load_tokenizer(Path(quire.__file__).parent / "demo")
    return Compiler(Vocabulary(tokenizer.grammar_table, 4096, (0,)))


def accepts(compiler: Compiler, params: StructuredOutputsParams, text: str) -> bool:
    """Whether a whole output may be `text`."""
    matcher: llguidance.LLMatcher = compiler.compile(params).deep_copy()
    ids = compiler._table.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CALL = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
        "end": "</f>"}  # fmt: skip
OTHER = {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "x/y+"}, "end": "</f>"}
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL, OTHER]}
TAGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (CALLS, ["hi", "", "so <f=a>5</f> and <f=b>x/yy</f>."], ["<f=a>x</f>", "<f=c>", "a <f=a>5"]),
    (CALLS | {"at_least_one": True}, ["<f=a>5</f>", "<f=a>5</f> more"], ["", "hi <f=a>5</f>"]),
    (CALLS | {"at_least_one": True, "stop_after_first": True}, ["<f=a>5</f>"], ["<f=a>5</f>x"]),
    (
        {"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ";", "at_least_one": True},
        ["<f=a>5</f>", "<f=a>5</f>;<f=b>x/y</f>"],
        ["", "<f=a>5</f><f=a>5</f>"],
    ),
    ({"type": "or", "elements": [{"type": "const_string", "value": "a"}, CALL]}, ["a", "<f=a>1</f>"], ["b", "aa"]),
    (
        {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "END"},
                                          {"type": "grammar", "grammar": 'start: "x" /y*/'}]},
        ["ENDx", "so long ENDxyy"],
        ["x", "END", "so"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("format", "good", "bad"), TAGS)
def test_structural_tags(compiler: Compiler, format: dict[str, Any], good: list[str], bad: list[str]) -> None:
    params = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": format})
    assert [text for text in good if not accepts(compiler, params, text)] == []
    assert [text for text in bad if accepts(compiler, params, text)] == []


def test_options_whose_discriminator_has_a_default(compiler: Compiler) -> None:
    class Cat(pydantic.BaseModel):
        kind: Literal["cat"] = "cat"

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"] = "dog"

    class Home(pydantic.BaseModel):
        pets: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]]

    params = StructuredOutputsParams(json=Home.model_json_schema())
    assert accepts(compiler, params, '{"pets": [{"kind": "dog"}, {"kind": "cat"}]}')
    for wrong in ('{"pets": [{}]}', '{"pets": [{"kind": "cow"}]}', '{"pets": [], "more": 1}'):
        assert not accepts(compiler, params, wrong)


class Text(pydantic.BaseModel):
    kind: Literal["text"] = "text"
    text: str


class Box(pydantic.BaseModel):
    kind: Literal["row", "column"] = "row"
    parts: list["Widget"] = pydantic.Field(deprecated=True, json_schema_extra={"x-order": 3})
    first: "Widget | None" = pydantic.Field(None, json_schema_extra={"example": {"kind": "text"}, "nullable": True})


Widget = Annotated[Text | Box, pydantic.Field(discriminator="kind")]
Box.model_rebuild()


def test_options_that_lead_back_to_their_union(compiler: Compiler) -> None:
    params = StructuredOutputsParams(json=pydantic.TypeAdapter(Widget).json_schema())
    assert accepts(compiler, params, '{"kind": "text", "text": "a"}')
    inner = '{"kind": "row", "parts": [], "first": null}'
    assert accepts(compiler, params, f'{{"kind": "column", "parts": [{inner}], "first": {inner}}}')
    for wrong in ('{"text": "a"}', '{"kind": "text", "text": "a", "more": 1}', '{"kind": "column", "parts": [{}]}'):
        assert not accepts(compiler, params, wrong)


A = {"type": "object", "properties": {"k": {"const": "a"}, "n": {"$ref": "#/$defs/U"}}, "required": ["k"]}
B = {"type": "object", "properties": {"k": {"type": "string", "enum": ["b"]}}, "required": ["k"]}
C = {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}
UNIONS: list[tuple[list[Any], list[str], list[str]]] = [
    ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], ['{"k": "a", "n": {"k": "b"}}'], ['{"k": "b", "n": {}}', "{}"]),
    ([{"$ref": "#/$defs/A"}, {"type": "null"}], ["null", '{"k": "a", "n": null}'], ['{"k": "b"}', "{}"]),
    ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/S"}], ['"x"', '{"k": "a", "n": "x"}'], ['"z"']),
]


@pytest.mark.parametrize(("options", "good", "bad"), UNIONS)
def test_options_that_exclude_each_other(
    compiler: Compiler, options: list[Any], good: list[str], bad: list[str]
) -> None:
    names = {"U": {"oneOf": options}, "A": A, "B": B, "S": {"type": "string", "enum": ["x", "y"]}}
    params = StructuredOutputsParams(json={"$ref": "#/$defs/U", "$defs": names})
    assert [text for text in good if not accepts(compiler, params, text)] == []
    assert [text for text in bad if accepts(compiler, params, text)] == []


def test_options_that_may_not_exclude_each_other_stay() -> None:
    for options in ([A, A], [{"$ref": "#/$defs/A"}] * 2, [A, C], [B, True], [{"type": "object"}, A], [C, C]):
        schema = {"oneOf": options, "$defs": {"A": {**A, "properties": {"k": {"const": "a"}}}, "U": {}}}
        assert narrowed(schema)["oneOf"] == options
    inside = {"properties": {"a": {"oneOf": [A, B]}, "b": {"$ref": "#/properties/a/oneOf/1"}}, "$defs": {"U": {}}}
    assert "oneOf" in narrowed(inside)["properties"]["a"], "a reference leads through it"


def test_many_options_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with each: those that have not been by then are left as they are."""
    kinds = [{**B, "properties": {"k": {"const": f"kind {n}"}}} for n in range(30)]
    schema = {"anyOf": [{"oneOf": kinds[n : n + 3]} for n in range(0, 30, 3)]}
    assert [*map(list, narrowed(schema)["anyOf"])] == [["anyOf"]] * 10
    assert "anyOf" in narrowed({"oneOf": kinds})
    monkeypatch.setattr("quire.text.grammars.schema.MAX_TESTS", 4000)
    assert 1 < [*map(list, narrowed(schema)["anyOf"])].count(["anyOf"]) < 9
    assert "oneOf" in narrowed({"oneOf": kinds})


@pytest.mark.parametrize("word", ["nullable", "example", "deprecated", "x-order", "propertyOrder", "externalDocs"])
def test_words_beside_a_reference_that_leads_back(compiler: Compiler, word: str) -> None:
    back = {"$ref": "#/components/schemas/N", word: True}
    node = {"type": "object", "properties": {"n": back, "a": {"type": "array", "items": back}}}
    schema = {"$ref": "#/components/schemas/N", "components": {"schemas": {"N": node}}}
    params = StructuredOutputsParams(json=schema)
    assert accepts(compiler, params, '{"n": {"a": [{}]}}')
    assert not accepts(compiler, params, '{"n": {"b": 1}}')


def test_what_only_references_lead_to_is_not_left_out(compiler: Compiler) -> None:
    for word, value in (("uniqueItems", True), ("propertyNames", {"maxLength": 3})):
        schema = {"$ref": "#/x/N", "x": {"N": {"type": ["array", "object"], word: value}}}
        with pytest.raises(InvalidRequestError, match=word):
            compiler.compile(StructuredOutputsParams(json=schema))
    schema = {"oneOf": [{"type": "array", "uniqueItems": False}, {"minimum": 3, "type": "integer"}]}
    assert accepts(compiler, StructuredOutputsParams(json=schema), "[1, 1]")


def test_options_are_not_compared_by_more_names_than_that_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """3,000 options of ten names each: 30,000 names in each of 3,000 outlines would take minutes."""
    monkeypatch.setattr("quire.text.grammars.schema._outline", lambda *args: pytest.fail("it was begun"))
    names = [[f"{number}_{place}" for place in range(10)] for number in range(3000)]
    options = [{"type": "object", "properties": dict.fromkeys(own, {"const": 1}), "required": own} for own in names]
    assert len(narrowed({"oneOf": options})["oneOf"]) == 3000


def test_objects_in_structural_tags_are_closed(compiler: Compiler) -> None:
    content = {"type": "json_schema", "json_schema": X}
    form = {"type": "tag", "begin": "<x>", "content": content, "end": "</x>"}
    for tag in ({"type": "structural_tag", "format": form},
                {"triggers": ["<x>"], "structures": [{"begin": "<x>", "schema": X, "end": "</x>"}]}):  # fmt: skip
        params = StructuredOutputsParams(structural_tag=tag)
        assert accepts(compiler, params, '<x>{"x": 1}</x>')
        assert not accepts(compiler, params, '<x>{"x": 1, "y": 1}</x>')


def test_the_older_structural_tags(compiler: Compiler) -> None:
    tag = {"type": "structural_tag", "triggers": ["<f="],
           "structures": [{"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"}]}  # fmt: skip
    params = StructuredOutputsParams(structural_tag=tag)
    assert accepts(compiler, params, "so <f=a>true</f> it is")
    assert not accepts(compiler, params, "so <f=a>1</f> it is")


def test_many_references(monkeypatch: pytest.MonkeyPatch) -> None:
    chain: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(10_000)}
    schema = {"$ref": "#/$defs/d0", "$defs": chain | {"d10000": {"type": "string"}}}
    check_schema(schema)  # each is tested once or twice
    monkeypatch.setattr("quire.text.grammars.schema.MAX_TESTS", 1000)
    with pytest.raises(InvalidRequestError, match="too many parts"):
        check_schema(schema)


def test_after_a_thought_that_ends_in_a_special_token(compiler: Compiler) -> None:
    params = after(StructuredOutputsParams(choice=["yes", "no"]), "<|end|>\nThus: ")
    assert accepts(compiler, params, "I think so<|end|>\nThus: yes")
    assert accepts(compiler, params, "<|end|>\nThus: no")
    assert not accepts(compiler, params, "yes")


def test_after_a_thought_tags_of_the_older_form(compiler: Compiler) -> None:
    structure = {
        "begin": "<f=x>",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "end": "</f>",
    }
    tag = {"type": "structural_tag", "structures": [structure], "triggers": ["<f="]}
    params = after(StructuredOutputsParams(structural_tag=tag), "</think>")
    for text in ("hm</think>so it is", 'hm</think>so <f=x>{"a": 1}</f> it is'):
        assert accepts(compiler, params, text), text
    for text in ('hm</think>so <f=x>{"a": "b"}</f>', "hm</think>so <f=y>{}</f>"):
        assert not accepts(compiler, params, text), text
    with pytest.raises(InvalidRequestError, match="lacks 'triggers'"):
        after(StructuredOutputsParams(structural_tag={"structures": [structure]}), "</think>")


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        ({"type": "song"}, "'song'"),
        ({"type": "sequence"}, "lacks 'elements'"),
        ({"type": "or", "elements": []}, "no elements"),
        ({"type": "triggered_tags", "triggers": ["<g"], "tags": [CALL]}, "no trigger"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}, "any_text is followed by"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "'not' at #"),
    ],
)
def test_wrong_structural_tags(compiler: Compiler, format: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        compiler.compile(StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": format}))


@pytest.mark.slow
def test_what_would_take_for_ever_is_stopped(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.text.grammars.compiler._SECONDS", (0.0, 0.1, 0.2, 0.5))
    schema = {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(1, 40)]}
    with pytest.raises(InvalidRequestError, match="takes more than"):
        compiler.compile(StructuredOutputsParams(json=schema))
    assert accepts(compiler, StructuredOutputsParams(regex="a+"), "aaa"), "and another process is there for the next"


def test_a_large_divisor_is_tried_in_a_process_first(compiler: Compiler) -> None:
    """Of 999,983 it would take 9 s and 360 MB, where nobody can stop it, and all others wait."""
    with pytest.raises(TooLongError):
        compiler.compile(StructuredOutputsParams(json={"type": "integer", "multipleOf": 999}), 0)
    assert accepts(compiler, StructuredOutputsParams(json={"type": "integer", "multipleOf": 999}), "1998")


def test_schemas_with_many_bounds_are_tried_in_a_process_first(compiler: Compiler) -> None:
    """Six hundred take a sixth of a second already, and a source of 11,000 characters."""
    few, many = ({"anyOf": [{"maxItems": 9 + most} for most in range(num)]} for num in (10, 201))
    compiler.compile(StructuredOutputsParams(json=few), 0)
    with pytest.raises(TooLongError):
        compiler.compile(StructuredOutputsParams(json=many), 0)


def test_a_process_that_was_stopped_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "_ask", lambda *_: False)
    gc.collect()  # what other tests have left open may be closed meanwhile
    trial, before = Trial(), {*os.listdir("/dev/fd")}
    assert not trial.passes("start: /a/", 1.0)
    assert {*os.listdir("/dev/fd")} <= before


REASONS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a(b"}, "line 1, column 2: unclosed group."),
    ({"regex": "a/\nb/[z-a]"}, "line 2, column 4: invalid character class range"),
    ({"regex": "a\\"}, "line 1, column 2: nothing comes after the last backslash."),
    ({"regex": "a^b"}, "the regex 'a^b' has a word boundary, or an anchor"),
    ({"regex": "[^\\x00-\\U0010ffff]"}, "no text obeys it"),
    ({"json": {"type": "string", "format": "email", "minLength": 100}}, "a pattern, a format and lengths contra"),
    ({"grammar": 'start: "a"\n | foo'}, 'line 2, column 4: unknown name: "foo".'),
    ({"grammar": 'start: NAME\nNAME: /[a-/'},
     "line 2, column 7: unclosed character class, at character 1 of the regex"),
    ({"grammar": "start: @foo"}, "line 1, column 8: unknown grammar @foo."),
    ({"grammar": 'start: "a"\n  %json {"type": '},
     'line 2, column 3: failed to parse "%json": EOF while parsing a value.'),
    ({"grammar": "start: start"}, "no text obeys it: it contradicts itself, or leads back to itself without an end."),
    ({"grammar": 'root ::= "foo"\n  bar | foo'}, "line 2, column 7 of the GBNF grammar: expected ::=."),
    ({"grammar": 'root ::= "foo" # foo\n  | foo'}, "line 2, column 3 of the GBNF grammar: expected name."),
    ({"grammar": 'root ::= "foo" |\n foo # foo'}, "line 2, column 2 of the GBNF grammar: rule 'foo' not found."),
    ({"grammar": 'a ::= "a"'}, "line 1, column 1 of the GBNF grammar: no 'root' rule found."),
    ({"grammar": 'root ::= "a'}, "line 1, column 12 of the GBNF grammar: unexpected end of input."),
    ({"grammar": 'root ::= "a\\'}, "line 1, column 13 of the GBNF grammar: incomplete escape sequence."),
    ({"grammar": 'root ::= "a"\nb ::= "b"\nroot ::= b'},
     "line 3, column 1 of the GBNF grammar: there is a rule 'root'"),
    ({"grammar": 'root ::= "a"{2,1}'}, "line 1, column 13: range end must be >= start, got (2, 1)."),
    ({"grammar": 'root ::= "a" | [z-a]'}, "line 1, column 16: invalid character class range"),
    ({"grammar": "root ::= " + "(" * 10_000}, "the GBNF grammar is nested too deep"),
    ({"json": {"items": {"type": "foo"}}}, "'type' at #/items must be of array, boolean"),
    ({"json": {"items": {"pattern": "a(b", "type": "string"}}},
     "unclosed group, at character 2 of the regex 'a(b' at #/items."),
    ({"json": {"items": {"format": "foo"}}},
     "the format 'foo' at #/items is not supported; leave it out, or use a pattern."),
    ({"json": {"items": {"oneOf": [{"type": "string"}, {"minLength": 3}]}}}, "the options of 'oneOf' at #/items don't"),
    ({"json": {"type": "string", "pattern": "^a$", "minLength": 5}},
     "Unsatisfiable schema: a pattern, a format and lengths"),
    ({"json": {"$schema": "http://a/b"}}, "$schema 'http://a/b' is not known; leave it out."),
    ({"json": {"minimum": "x"}}, "'minimum' at # must be a number; it is 'x'."),
]  # fmt: skip


@pytest.mark.parametrize(("structure", "reason"), REASONS, ids=lambda value: str(value)[:50])
def test_reasons_are_in_the_terms_of_who_wrote_it(compiler: Compiler, structure: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(**structure))
    assert str(caught.value).startswith(reason)


def test_places_in_what_is_no_user_s_own_are_not_told(compiler: Compiler) -> None:
    structures: list[dict[str, Any]] = [
        {"grammar": f'{OURS}start: %json {{"type": "foo"}}'},
        {"structural_tag": {"format": {"type": "grammar", "grammar": 'start: %json {"type": "foo"}'}}},
    ]
    for structure in structures:
        with pytest.raises(InvalidRequestError, match="^failed to compile JSON schema: 'foo' is no type"):
            compiler.compile(StructuredOutputsParams(**structure))
    tag = {"format": {"type": "grammar", "grammar": 'start: "a"\n | b'}}
    with pytest.raises(InvalidRequestError, match='^line 2, column 4 of a grammar in it: unknown name: "b".'):
        compiler.compile(StructuredOutputsParams(structural_tag=tag))


def test_gbnf_within_a_structural_tag(compiler: Compiler) -> None:
    params = StructuredOutputsParams(structural_tag={"format": {"type": "grammar", "grammar": 'root ::= "a" [b-c]'}})
    assert accepts(compiler, params, "ac")
    assert not accepts(compiler, params, "a")


@pytest.mark.parametrize(
    "constraint", [{"regex": "[ab]+"}, {"grammar": 'root ::= "a" "b"*'}, {"choice": ["ab", "abb"]}]
)
def test_after_a_thought_that_need_not_be(compiler: Compiler, constraint: dict[str, Any]) -> None:
    params = after(StructuredOutputsParams(**constraint), "</think>", "<think>", optional=True)
    for text in ("abb", "<think>so it is</think>abb", "<think></think>\n\nab"):
        assert accepts(compiler, params, text), text
    for text in ("c", "<think>so it is</think>c", "<think>ab", "\nab", "so</think>ab"):
        assert not accepts(compiler, params, text), text
    channels = after(StructuredOutputsParams(**constraint), "</think>", "<think>", "Thus: ", optional=True)
    assert accepts(compiler, channels, "Thus: ab")
    assert accepts(compiler, channels, "<think>hm</think>Thus: abb")
    assert not accepts(compiler, channels, "<think>hm</think>abb")
