"""The body of /v1/completions."""

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from quire.entrypoints.server.requests_common import GenerationRequest, refuse

MAX_PROMPTS = 1024

_Ids = Annotated[list[int], Field(min_length=1)]
PromptSchema = (
    Annotated[str, Field(min_length=1)]
    | _Ids
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
)


def read_prompts(value: Any) -> list[str] | list[list[int]]:
    """All four forms as a list of prompts; by hand, since a union would be tried token by token for each form."""
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif isinstance(value, list) and value:
        prompts = value if isinstance(value[0], str | list) else [value]
    else:
        raise ValueError("must be a text, a list of texts, token ids, or a list of lists of token ids, and not empty")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"{len(prompts)} prompts; a request may have {MAX_PROMPTS}")
    kind = str if isinstance(prompts[0], str) else list
    for place, prompt in enumerate(prompts):
        where = f"prompt {place} " if len(prompts) > 1 else ""
        if not isinstance(prompt, kind):
            raise ValueError(f"{where}is of another kind than the first: give texts only, or lists of token ids only")
        if not prompt:
            raise ValueError(f"{where}is empty; give at least one {'character' if kind is str else 'token id'}")
        if kind is list and (wrong := set(map(type, prompt)) - {int}):
            raise ValueError(f"{where}holds a {wrong.pop().__name__}; token ids must be integers")
    return prompts


Prompts = Annotated[list[str] | list[list[int]], PlainValidator(read_prompts, json_schema_input_type=PromptSchema)]


class CompletionRequest(GenerationRequest):
    """A prompt, or several, to go on with."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    """16 by default; 0 only with echo."""
    logprobs: int | None = Field(None, ge=-1)
    """Logprobs of each token and of so many of the likeliest."""

    # Refused.
    suffix: Annotated[None, refuse("filling in before a suffix is not supported; leave it out", "")] = None

    def output_limit(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens


class OtherCompletion(CompletionRequest):
    """A request of another API, read as one of this."""

    max_tokens: int | None = Field(None, ge=-1)
    """-1: to the end of the context."""
