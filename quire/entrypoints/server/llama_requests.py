"""The bodies of llama.cpp's own routes, in the names of its server.

Fields of no effect here are left to `unknown_fields`, which tells the client so: how its cache and threads are to work,
and settings of samplers that are off.
"""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, field_validator

from quire.entrypoints.server.completion_request import MAX_PROMPTS
from quire.entrypoints.server.requests_common import MAX_BIASES, NO_SAMPLER, AnyRequest, LlamaSampling, refuse

# fail_fast: as in `requests_common`.
_Tokens = Annotated[list[int | str], Field(fail_fast=True)]
_Prompt = str | Annotated[list[int | str | _Tokens], Field(fail_fast=True)]
_Pair = Annotated[list[int | float | bool], Field(fail_fast=True)]
_Pairs = Annotated[list[_Pair], Field(fail_fast=True, max_length=MAX_BIASES)]


class LlamaCompletionRequest(AnyRequest, LlamaSampling):
    """A prompt, or several, to go on with."""

    prompt: Annotated[_Prompt, Field(min_length=1)]
    """Text, tokens, both in turn, or a list of such."""
    n_predict: int | None = Field(None, ge=-2)
    """-1 (the default) and -2: to the end of the context."""
    logit_bias: dict[str, float] | _Pairs | None = None
    """Pairs of a token and what is added to its logit; false: never."""
    ignore_eos: bool | None = None
    n_probs: int | None = Field(None, ge=0)
    """So many of the likeliest tokens beside each."""
    json_schema: dict[str, Any] | str | None = None
    grammar: str | None = None
    """GBNF, or Lark."""
    return_tokens: bool | None = None

    # Refused.
    dry_multiplier: Annotated[None, refuse(NO_SAMPLER, 0, 0.0)] = None
    xtc_probability: Annotated[None, refuse(NO_SAMPLER, 0, 0.0)] = None
    dynatemp_range: Annotated[None, refuse(NO_SAMPLER, 0, 0.0)] = None
    top_n_sigma: Annotated[None, refuse(NO_SAMPLER, -1, -1.0)] = None
    post_sampling_probs: Annotated[None, refuse("probabilities are those before sampling; leave it out", False)] = None
    image_data: Annotated[None, refuse("this model takes text only; leave it out", [])] = None
    lora: Annotated[None, refuse("name the adapter as the model", [])] = None

    @field_validator("logit_bias")
    @classmethod
    def _by_token(cls, value: Any) -> dict[str, float] | None:
        if not isinstance(value, list):
            return value
        if any(len(pair) != 2 for pair in value):
            raise ValueError("must have pairs: a token id, and what is added to its logit")
        return {str(token): -100.0 if bias is False else float(bias) for token, bias in value}


class LlamaEmbeddingRequest(AnyRequest):
    """Texts that are to become vectors."""

    content: Annotated[_Prompt, Field(min_length=1, validation_alias=AliasChoices("content", "input"))]
    """Text, tokens, both in turn, or a list of such; also as input."""
    embd_normalize: Literal[-1, 2] | None = None
    """-1: as they are; 2 (the default): of length 1."""

    # Refused.
    stream: Annotated[None, refuse("vectors come whole; leave it out", False)] = None  # type: ignore[assignment]


def prompts_of(prompt: _Prompt) -> list[str | list[int | str]]:
    """A list of tokens and texts is one prompt; one of texts, or of lists, is several."""
    if isinstance(prompt, str):
        return [prompt]
    if any(isinstance(part, int) for part in prompt):
        return [[part for part in prompt if not isinstance(part, list)]]
    return [part for part in prompt if not isinstance(part, int)][: MAX_PROMPTS + 1]  # one too many will be refused
