"""What a request's body says of its output's form: `response_format`, vLLM's fields and the older `guided_*` ones.

`sampling` asks when it makes a request's parameters. Which constraint it is, and that there is one only, is said here;
whether it can be compiled is for the engine to say. Knows no engine.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from quire.entrypoints.server.options import StructureOptions
from quire.entrypoints.server.requests_common import GenerationRequest, wrong
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams

# Field of the body -> of the parameters.
_FIELDS = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
_FIELDS |= {"json_schema": "json", "grammar": "grammar", "structural_tag": "structural_tag"}
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties")
_TYPES = "'text', 'json_object', 'json_schema' or 'structural_tag'"


def structure_of(body: GenerationRequest) -> StructuredOutputsParams | None:
    """What constrains the output; None where nothing does.

    Raises:
        InvalidRequestError: several fields do, or one has no constraint of its kind.
    """
    found: dict[str, Mapping[str, Any] | None] = {}
    if body.response_format is not None:
        found["response_format"] = _of_format(body.response_format)
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs
    found |= {name: {_FIELDS[name]: value} for name in _FIELDS if (value := getattr(body, name)) is not None}
    given = {name: fields for name, fields in found.items() if fields is not None}
    if not given:
        return None
    if len(given) > 1:
        message = f"{' and '.join(given)} constrain the output both; give one of them only."
        raise InvalidRequestError(message, list(given)[-1])
    ((name, fields),) = given.items()
    if body.guided_whitespace_pattern is not None:
        fields = {"whitespace_pattern": body.guided_whitespace_pattern, **fields}
    try:
        return StructuredOutputsParams(**fields)
    except InvalidRequestError as error:
        own = r"^structured_outputs(?=\.)" if name == "structured_outputs" else r"^structured_outputs(\.\w+)?"
        message = re.sub(own, name, str(error))
        message = message.replace("StructuredOutputsParams has no argument", f"{name} has no field")
        raise InvalidRequestError(message, name) from None


def held_to(params: SamplingParams, options: StructureOptions) -> SamplingParams:
    """The parameters, where they ask for a structure, with what holds of all."""
    given = {name: True for name in _SWITCHES if getattr(options, name)}
    if params.structured_outputs is None or not given:
        return params
    return replace(params, structured_outputs=replace(params.structured_outputs, **given))


def names_of(body: GenerationRequest) -> dict[str, str]:
    """What the engine's parameter is called in this body, for errors that the engine finds."""
    given = [name for name in ("response_format", *_FIELDS) if getattr(body, name) is not None]
    return {"structured_outputs": given[0]} if given else {}


def _of_format(format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Fields of the parameters; None for plain text."""
    match format.get("type"):
        case "text":
            return None
        case "json_object":
            schema = format.get("schema")  # as llama.cpp has it
            return {"json_object": True} if schema is None else {"json": schema}
        case "json_schema":
            given = format.get("json_schema")
            if not isinstance(given, Mapping) or given.get("schema") is None:
                raise wrong("response_format.json_schema", 'an object with a "schema"', given, "response_format")
            if not isinstance(name := given.get("name", ""), str):
                raise wrong("response_format.json_schema.name", "a text", name, "response_format")
            if type(strict := given.get("strict")) not in (bool, type(None)):
                raise wrong("response_format.json_schema.strict", "true, false or null", strict, "response_format")
            # `strict` or not: a schema always holds.
            return {"json": given["schema"], "strict": bool(strict)}
        case "structural_tag":
            return {"structural_tag": dict(format)}
        case kind:
            raise wrong("response_format.type", _TYPES, kind, "response_format")
