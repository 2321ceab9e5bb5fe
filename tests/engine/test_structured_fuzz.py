"""Schemas by a generator, and those that installed packages ship: every finished output parses and validates.

QUIRE_NIGHTLY=1 takes 300 of the one kind and all of the other; drawn greedily, at temperature 2, four at a time, with a
few tokens only, and with so few blocks that sequences are preempted.
"""

import json
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from test_structured import PROMPTS, engine

from quire import SamplingParams

NIGHTLY = os.environ.get("QUIRE_NIGHTLY") == "1"
NUM_MADE, NUM_SHIPPED = (300, 1000) if NIGHTLY else (24, 4)
DRAWN: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 120},
    {"temperature": 2.0, "seed": 1, "max_tokens": 150, "n": 4},
    {"temperature": 1.0, "seed": 2, "max_tokens": 5},
]


def made(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema that finite values satisfy, of what is supported."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "format", "pattern"]
    kind = rng.choice(kinds + ["object", "array", "anyOf", "ref"] * 2 if depth else kinds)
    match kind:
        case "string":
            low = rng.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}
        case "integer":
            low = rng.randrange(-300, 300)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
        case "number":
            low = rng.randrange(-30, 30) / 4
            return {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randrange(1, 90) / 8}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": [rng.choice([1, "a", None, True, "x y", 2.5, [1], {"k": "v"}]) for _ in range(3)]}
        case "const":
            return {"const": rng.choice(["fixed text", 7, [True, None], {"a": {"b": []}}])}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time"])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{2,5}$", "^\\d{1,3}(-\\d)?$", "^(on|off)$"])}
        case "array":
            low = rng.randrange(3)
            array: dict[str, Any] = {
                "type": "array",
                "items": made(rng, depth - 1),
                "minItems": low,
                "maxItems": low + 2,
            }
            if rng.random() < 0.3:
                array |= {"prefixItems": [made(rng, depth - 1)]}
            return array
        case "anyOf":
            return {"anyOf": [made(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
        case "ref":
            inner = made(rng, depth - 1)
            return {"type": "object", "properties": {"v": inner, "again": {"anyOf": [inner, {"type": "null"}]}},
                    "required": ["v"], "additionalProperties": False}  # fmt: skip
    names = rng.sample(["name", "id", "tags", "kind of", "x", "\u00e9t\u00e9", "a-b"], rng.randrange(1, 5))
    more = rng.choice([False, False, {"type": "integer"}])
    properties = {name: made(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def shipped() -> Iterator[dict[str, Any]]:
    """Schemas of installed packages, in the order of their paths."""
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.json")):
        if "schema" in path.name or "schema" in path.parent.name:
            try:
                schema = json.loads(path.read_text())
            except (ValueError, UnicodeDecodeError):
                continue
            if isinstance(schema, dict) and {"$schema", "properties", "$defs", "definitions"} & set(schema):
                yield schema


def check(schemas: list[dict[str, Any]], **options: Any) -> tuple[int, int, int]:
    """How many outputs finished and were valid, how many were cut, how many schemas were refused, with a reason."""
    one = engine(max_num_seqs=16, **options)
    num_valid = num_cut = num_refused = 0
    todo = [(schema, drawn) for schema in schemas for drawn in DRAWN]
    for number, (schema, drawn) in enumerate(todo):
        params = SamplingParams(structured_outputs={"json": schema, "disable_any_whitespace": number % 2 == 0}, **drawn)
        one.add_request(str(number), PROMPTS[number % 4], params)
    while one.has_unfinished_requests():
        for output in one.step():
            if not output.finished:
                continue
            schema = todo[int(output.request_id)][0]
            for part in output.outputs:
                if part.finish_reason == "error":
                    assert str(part.stop_reason).startswith("structured_outputs can't be used: ")
                    num_refused += 1
                elif part.finish_reason == "stop":
                    jsonschema.validators.validator_for(schema)(schema).validate(json.loads(part.text))
                    num_valid += 1
                else:
                    num_cut += 1
    one.check_integrity()
    return num_valid, num_cut, num_refused


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1024, 40])
def test_schemas_by_a_generator(blocks: int) -> None:
    rng = random.Random(5)
    num_valid, num_cut, num_refused = check([made(rng) for _ in range(NUM_MADE)], num_kv_blocks=blocks)
    assert num_refused == 0
    assert num_valid > 2 * NUM_MADE
    assert num_cut


@pytest.mark.slow
def test_schemas_of_packages() -> None:
    schemas = list(shipped())[:NUM_SHIPPED]
    num_valid, num_cut, num_refused = check(schemas)
    assert num_valid + num_cut + num_refused >= len(schemas)
