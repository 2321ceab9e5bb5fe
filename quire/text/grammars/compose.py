"""Constraints put together: the same one after free text, or as a part of a structural tag.

The server calls it for answers that begin with a thought. It knows no tokens.
"""

from typing import Any

import msgspec

from quire.structured_outputs import CONSTRAINTS, StructuredOutputsParams
from quire.text.grammars.source import parsed
from quire.text.grammars.tags import format_in


def after(
    params: StructuredOutputsParams, end: str, begin: str = "", then: str = "", optional: bool = False
) -> StructuredOutputsParams:
    """The same constraint, which holds once free text has come to `end`: a thought, say; the text may be empty.

    Args:
        end, begin: special tokens are named in them as they are written. The free text must begin with `begin`.
        then: what comes before the constrained text, free text or not; without it up to two line ends may come.
        optional: there may be no free text at all.

    Raises:
        InvalidRequestError: as `format_of`.
    """
    parts: list[dict[str, Any]] = [{"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}]
    parts += [] if then else [{"type": "regex", "pattern": "\\n{0,2}"}]
    if optional:
        free = {"type": "sequence", "elements": parts}
        parts = [{"type": "or", "elements": [free, {"type": "const_string", "value": ""}]}]
    parts += [{"type": "const_string", "value": then}] if then else []
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [*parts, format_of(params)]}}
    return msgspec.structs.replace(params, **(dict.fromkeys(CONSTRAINTS) | {"structural_tag": tag}))


def format_of(params: StructuredOutputsParams) -> dict[str, Any]:
    """A constraint as a format of structural tags.

    Raises:
        InvalidRequestError: it is no JSON, or no structural tag.
    """
    text, told = params.constraint, ("structured_outputs can't be used: ", "structured_outputs")
    match params.kind:
        case "json" | "json_object":
            return {"type": "json_schema", "json_schema": parsed(text, *told) if params.json else {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": text}
        case "grammar":
            return {"type": "grammar", "grammar": text}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": v} for v in params.choice or ()]}
        case _:
            return format_in(parsed(text, *told))
