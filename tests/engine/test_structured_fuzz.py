"""Schemas by a generator, and those that installed packages ship: every finished output parses and validates.

QUIRE_NIGHTLY=1 takes 300 of the one kind and 200 of the other; drawn greedily, at temperature 2, four at a
time, with a few tokens only, and with so few blocks that sequences are preempted.
"""

import importlib
import inspect
import json
import os
import pkgutil
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import pytest
from jsonschema.validators import Draft202012Validator, validator_for
from test_structured import PROMPTS, engine

from quire import SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.text.configured import config_tokenizer

NIGHTLY = os.environ.get("QUIRE_NIGHTLY") == "1"
NUM_MADE, NUM_SHIPPED = (300, 1000) if NIGHTLY else (24, 4)
PACKAGES = [("openai.types", 20), ("anthropic.types", 20)] if NIGHTLY else [("openai.types.chat", 4)]
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
    """Schemas that installed packages have as files, in the order of their paths."""
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.json")):
        if "schema" in path.name or "schema" in path.parent.name or path.parent.name == "metaschemas":
            try:
                schema = json.loads(path.read_text())
            except (ValueError, UnicodeDecodeError):
                continue
            if isinstance(schema, dict) and {"$schema", "properties", "$defs", "definitions"} & set(schema):
                yield schema


def modelled(package: str, every: int) -> Iterator[dict[str, Any]]:
    """Schemas of the pydantic models that a package has, every so many-th in the order of their names."""
    found: dict[str, type[pydantic.BaseModel]] = {}
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        for kind in vars(importlib.import_module(info.name)).values():
            if inspect.isclass(kind) and issubclass(kind, pydantic.BaseModel) and kind.__module__ == info.name:
                found[f"{info.name}.{kind.__name__}"] = kind
    for name in sorted(found)[::every]:
        yield found[name].model_json_schema()


class Told(NamedTuple):
    """What came of some schemas."""

    num_valid: int  # outputs that finished, each of which was parsed and validated
    num_cut: int
    num_held: int  # schemas
    refused: Counter[str]  # the others, by what is not supported


def likely_ends(one: LLMEngine) -> list[int]:
    """Tokens that end a string, an object or a list."""
    tokenizer = config_tokenizer(one.config)
    assert tokenizer is not None
    return [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) in ('"', '",', '"}', "}", "]")]


def check(schemas: list[dict[str, Any]], may_grow: bool = True, **options: Any) -> Told:
    """Draw outputs of each in every way; those that finish must be valid, and a schema is held or refused by name.

    Unless they `may_grow`, properties that a schema does not name are left out, and what ends anything is likely.
    """
    one = engine(max_num_seqs=16, **options)
    ends = {} if may_grow else dict.fromkeys(likely_ends(one), 9.0)
    num_valid = num_cut = 0
    held, refused = set[int](), dict[int, str]()
    todo = [(place, drawn) for place in range(len(schemas)) for drawn in DRAWN]
    for number, (place, drawn) in enumerate(todo):
        form = {"json": schemas[place], "disable_any_whitespace": number % 2 == 0}
        if not may_grow:
            form["disable_additional_properties"] = True
            drawn = drawn | {"logit_bias": ends}
        one.add_request(str(number), PROMPTS[number % 4], SamplingParams(structured_outputs=form, **drawn))
    while one.has_unfinished_requests():
        for output in one.step():
            if not output.finished:
                continue
            place = todo[int(output.request_id)][0]
            for part in output.outputs:
                if part.finish_reason == "error":
                    refused[place] = str(part.stop_reason)
                    assert re.match("structured_outputs can't be used: .*'[^']+'", refused[place]), refused[place]
                    continue
                held.add(place)
                if part.finish_reason == "stop":
                    kind = validator_for(schemas[place], Draft202012Validator)
                    kind(schemas[place], format_checker=kind.FORMAT_CHECKER).validate(json.loads(part.text))
                    num_valid += 1
                else:
                    assert part.finish_reason == "length"
                    num_cut += 1
    one.check_integrity()
    if "num_kv_blocks" in options:
        assert (one.stats().num_preemptions_total > 0) == (options["num_kv_blocks"] < 100)
    assert held.isdisjoint(refused), "a schema is held once, and refused the next time"
    return Told(num_valid, num_cut, len(held), Counter(re.sub(" at #.*", "", text) for text in refused.values()))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1024, 17])
def test_schemas_by_a_generator(blocks: int) -> None:
    rng = random.Random(5)
    told = check([made(rng) for _ in range(NUM_MADE)], num_kv_blocks=blocks)
    assert not told.refused
    assert told.num_valid > 2 * NUM_MADE
    assert told.num_cut


@pytest.mark.slow
@pytest.mark.parametrize(("package", "every"), PACKAGES)
def test_schemas_of_packages_models(package: str, every: int) -> None:
    """What a vendor's own client sends and reads: none of it is refused."""
    pytest.importorskip(package)
    schemas = list(modelled(package, every))
    told = check(schemas, may_grow=False, max_model_len=512)
    assert told.num_held == len(schemas) > 10
    assert told.num_valid > 3 * len(schemas)


@pytest.mark.slow
def test_schemas_that_packages_ship() -> None:
    """The most difficult ones, such as JSON Schema's own; refused for a keyword that it names, or held."""
    schemas = list(shipped())[:NUM_SHIPPED]
    told = check(schemas, may_grow=False, max_model_len=512)
    assert told.num_held + told.refused.total() == len(schemas)
    assert not NIGHTLY or told.num_held > 2
    assert told.num_valid > 3 * told.num_held or not told.num_held
