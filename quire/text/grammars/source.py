"""From what a user gives to a grammar in llguidance's own language: schemas, regexes, choices, GBNF and Lark.

`compiler` calls it in threads of its own, as it may take long. What llguidance would not hold a model to is refused
here, by name; what llguidance itself refuses, it says when it compiles.
"""

import json
from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidRequestError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammars.gbnf import lark_of
from quire.text.grammars.schema import narrowed
from quire.text.grammars.tags import lark_of_tag, regex_as_lark

# Between the tokens of JSON, where nothing else is asked for: a weak model would go on with spaces for ever.
_WHITESPACE = r" |\n[ \t]{0,64}"


def source_of(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """What llguidance's matcher is made of.

    Args:
        special_tokens: ids of the tokens that stand for no text, by their names.

    Raises:
        InvalidRequestError: the constraint can't be held; says what in it, and where.
    """
    import llguidance

    text = params.constraint
    match params.kind:
        case "json" | "json_object":
            schema = {"type": "object"} if params.json_object else parsed(text)
            return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(prepared(schema, params)))
        case "regex":
            return llguidance.LLMatcher.grammar_from_lark(f"start: {regex_as_lark(text)}")
        case "choice":
            choices = " | ".join(json.dumps(choice) for choice in dict.fromkeys(params.choice or ()))
            return llguidance.LLMatcher.grammar_from_lark(f"start: {choices}")
        case "grammar":
            return llguidance.LLMatcher.grammar_from_lark(lark_of(text))
        case _:
            return lark_of_tag(parsed(text), lambda schema: prepared(schema, params), special_tokens)


def prepared(schema: Any, params: StructuredOutputsParams) -> dict[str, Any]:
    """A schema that was checked and narrowed, with the whitespace that may stand in its JSON."""
    schema = narrowed(schema, params.strict, params.disable_additional_properties)
    pattern = params.whitespace_pattern or _WHITESPACE
    options = {"whitespace_flexible": False} if params.disable_any_whitespace else {"whitespace_pattern": pattern}
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return {"x-guidance": {"lenient": False, "coerce_one_of": False, **options}, **schema}


def parsed(text: str, before: str = "", param: str | None = None) -> Any:
    """What JSON says; InvalidRequestError where it is none, with what a message is to begin with."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{before}it is no JSON: {error}.", param) from None
