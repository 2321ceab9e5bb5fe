"""StructuredOutputsParams: exactly one constraint, of the right form and of a bounded size."""

import json
import re
from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.structured_outputs import MAX_GRAMMAR_BYTES, GuidedDecodingParams, StructuredOutputsParams
from quire.text.grammars.compose import after, format_of
from quire.utils.keywords import UnknownParameterError

GIVEN: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": "a+",
    "choice": ["a", "b"],
    "grammar": 'start: "a"',
    "json_object": True,
    "structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}},
}


@pytest.mark.parametrize("kind", GIVEN)
def test_one_constraint(kind: str) -> None:
    params = StructuredOutputsParams(**{kind: GIVEN[kind]})
    assert params.kind == kind
    assert params.constraint
    assert "type" in format_of(params)


def test_exactly_one() -> None:
    with pytest.raises(InvalidRequestError, match="none is given"):
        StructuredOutputsParams()
    with pytest.raises(InvalidRequestError, match="none is given"):
        StructuredOutputsParams(json_object=False)
    with pytest.raises(InvalidRequestError, match=r"2 are given \(json, regex\)") as caught:
        StructuredOutputsParams(json={}, regex="a")
    assert caught.value.param == "structured_outputs"
    with pytest.raises(UnknownParameterError, match="regex"):
        StructuredOutputsParams(regexp="a")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "fields",
    [
        {"json": 5},
        {"json": "[]"},
        {"json": {"a": float("nan")}},
        {"regex": ""},
        {"regex": 5},
        {"grammar": ["start"]},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", ""]},
        {"choice": ["a", 5]},
        {"structural_tag": []},
        {"json_object": True, "whitespace_pattern": ""},
        {"regex": "a\ud800"},
        {"grammar": 'root ::= "\udfff"'},
        {"choice": ["a", "\ud800"]},
        {"json": '{"title": "\ud800"}'},
        {"json": {"properties": {"\ud800": {}}}},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "\ud800"}}},
        {"json_object": True, "whitespace_pattern": "\ud800"},
    ],
)
def test_wrong_forms_are_refused_by_name(fields: dict[str, Any]) -> None:
    name = list(fields)[-1]
    with pytest.raises(InvalidRequestError, match=rf"^structured_outputs\.{name} must be .*; it is "):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(("choice", "told"), [([], "0; it is []"), (["a"] * 16385, "16385; it is ['a', 'a', ")])
def test_choices_are_counted(choice: list[str], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"must be a list of 1 to 16384 strings, not {told}")):
        StructuredOutputsParams(choice=choice)


def test_half_a_surrogate_pair_is_named() -> None:
    message = "structured_outputs.regex must be without lone surrogates (U+D800 to U+DFFF); it is 'a\\ud800b'."
    with pytest.raises(InvalidRequestError) as refusal:
        StructuredOutputsParams(regex="a\ud800b")
    assert str(refusal.value) == message
    assert StructuredOutputsParams(regex="\U0001f600").constraint == "\U0001f600"


def test_size_is_bounded() -> None:
    with pytest.raises(InvalidRequestError, match=f"{MAX_GRAMMAR_BYTES} is the most"):
        StructuredOutputsParams(json=json.dumps({"description": "x" * 5_000_000}))


def test_after_a_thought() -> None:
    params = after(StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True), "</think>")
    assert params.kind == "structural_tag"
    assert params.disable_any_whitespace
    thought, _, then = json.loads(params.constraint)["format"]["elements"]
    assert thought["end"] == "</think>"
    assert then == {"type": "json_schema", "json_schema": {"type": "object"}}
    assert GuidedDecodingParams(regex="a", backend="auto").regex == "a"
