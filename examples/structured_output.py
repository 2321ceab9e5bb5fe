"""Outputs of a given form: schemas, regexes, choices, grammars. Run: python examples/structured_output.py

The bundled model is far too small to make sense, and yet its answers can't but parse.
"""

import json

from quire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "ships", "rain"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2}"),
    StructuredOutputsParams(choice=["north", "south"]),
    StructuredOutputsParams(grammar='root ::= item (", " item)*\nitem ::= ("tea" | "rain") "=" [0-9]'),
]


def main() -> None:
    llm = LLM("demo", max_model_len=256)
    params = [SamplingParams(temperature=0.8, seed=3, max_tokens=200, structured_outputs=one) for one in CONSTRAINTS]
    outputs = llm.generate(["Once upon a time"] * len(params), params, use_tqdm=False)
    for constraint, output in zip(CONSTRAINTS, outputs, strict=True):
        print(f"{constraint.kind:8} {output.outputs[0].text}")
    person = json.loads(outputs[0].outputs[0].text)
    assert set(person) == {"name", "age", "likes"}


if __name__ == "__main__":
    main()
