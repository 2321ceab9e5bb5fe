"""dspy: a model's texts, typed predictions by JSON schema, a stream of one."""

import asyncio
from typing import Any, Literal

import dspy
import harness

SAME: Any = {"api_base": f"{harness.URL}/v1", "api_key": "none", "temperature": 0.0, "max_tokens": 60, "cache": False}
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["box", "bag"]}},
    "required": ["place"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "find", "schema": SCHEMA}}
plain = dspy.LM("openai/demo", **SAME)
# DSPy asks models that it knows for schemas by itself; of others it has to be told.
typed = dspy.LM("openai/demo", **SAME, response_format=FORM)


class Find(dspy.Signature):
    """Say where."""

    question: str = dspy.InputField()
    place: Literal["box", "bag"] = dspy.OutputField()


def texts() -> None:
    (text,) = plain("Tell me a story.")
    assert text
    (answer,) = plain(messages=[{"role": "user", "content": "Tell me a story."}])
    assert answer == text


def predictions() -> None:
    with dspy.context(lm=typed, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Find)(question="Where is the cat?").place in ("box", "bag")


def streams() -> None:
    async def run() -> list[Any]:
        with dspy.context(lm=typed, adapter=dspy.JSONAdapter()):
            program = dspy.streamify(dspy.Predict(Find))
            return [part async for part in program(question="Where is the cat?")]

    *chunks, last = asyncio.run(run())
    assert chunks
    assert last.place in ("box", "bag")


harness.run(texts, predictions, streams)
