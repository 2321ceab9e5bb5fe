"""outlines: by its OpenAI and its vLLM models: text, streams, schemas; choices and regexes by the latter."""

import re
from typing import Any, Literal

import harness
import openai
import outlines
from pydantic import BaseModel, ConfigDict

client = openai.OpenAI(base_url=f"{harness.URL}/v1", api_key="none")
MODELS: dict[str, Any] = {
    "openai": outlines.from_openai(client, "demo"),
    "vllm": outlines.from_vllm(client, "demo"),
}


class Sighting(BaseModel):
    model_config = ConfigDict(extra="forbid")

    place: Literal["box", "bag"]


def texts() -> None:
    for name, model in MODELS.items():
        whole = model("Tell me a story.", max_tokens=30, temperature=0)
        assert whole, name
        assert "".join(model.stream("Tell me a story.", max_tokens=30, temperature=0)) == whole, name


def schemas() -> None:
    for name, model in MODELS.items():
        text = model("Where is the cat?", Sighting, max_tokens=60, temperature=0)
        assert Sighting.model_validate_json(text).place in ("box", "bag"), name


def choices_and_regexes() -> None:
    assert MODELS["vllm"]("Where?", Literal["box", "bag"]) in ("box", "bag")
    assert re.fullmatch("[0-9]{4}", MODELS["vllm"]("When?", outlines.types.Regex("[0-9]{4}")))


harness.run(texts, schemas, choices_and_regexes)
