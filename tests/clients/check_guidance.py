"""guidance: its OpenAI model: texts, and JSON by a schema. Its select and regex are for models that it runs itself."""

import json
from typing import Any

import guidance
import harness
from guidance import assistant, gen, user
from guidance.models import OpenAI

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["box", "bag"]}},
    "required": ["place"],
    "additionalProperties": False,
}


def asked(what: Any) -> Any:
    lm = OpenAI("demo", base_url=f"{harness.URL}/v1", api_key="none", echo=False)
    with user():
        lm += "Where is the cat?"
    with assistant():
        lm += what
    return lm


def texts() -> None:
    assert asked(gen("answer", max_tokens=20, temperature=0.0))["answer"]


def schemas() -> None:
    text = asked(guidance.json("answer", schema=SCHEMA))["answer"]
    # It joins the tokens of the logprobs, the last of which is the stop token here (there are two), as in vLLM.
    value, end = json.JSONDecoder().raw_decode(text)
    assert value["place"] in ("box", "bag")
    assert text[end:] in ("<|end|>", "<|endoftext|>")


harness.run(texts, schemas)
