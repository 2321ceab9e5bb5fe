"""instructor: answers as pydantic models, by JSON schema and by tools, from chat, responses and messages."""

from typing import Any, Literal

import harness
import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

MESSAGES: Any = [{"role": "user", "content": "Where is the cat?"}]
FIELDS: Any = {"model": "demo", "temperature": 0, "max_retries": 0}
raw = openai.OpenAI(base_url=f"{harness.URL}/v1", api_key="none", max_retries=0)


class Sighting(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or else a model that can't stop adds more and more

    place: Literal["box", "bag"]
    number: int = Field(ge=0, le=9)


def answer_in(mode: instructor.Mode, **fields: Any) -> Sighting:
    client = instructor.from_openai(raw, mode=mode)
    return client.chat.completions.create(messages=MESSAGES, response_model=Sighting, **FIELDS, **fields)


def by_schema() -> None:
    assert isinstance(answer_in(instructor.Mode.JSON_SCHEMA, max_tokens=100), Sighting)


def by_tools() -> None:
    assert isinstance(answer_in(instructor.Mode.TOOLS, max_tokens=100), Sighting)


def by_strict_tools() -> None:
    assert isinstance(answer_in(instructor.Mode.TOOLS_STRICT, max_tokens=100), Sighting)


def many() -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
    parts = client.chat.completions.create_partial(messages=MESSAGES, response_model=Sighting, max_tokens=100, **FIELDS)
    *_, last = parts
    assert last.place in ("box", "bag")


if __name__ == "__main__":
    harness.run(by_schema, by_tools, by_strict_tools, many)
