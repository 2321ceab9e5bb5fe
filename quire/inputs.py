"""What users pass as a prompt, and what it becomes once it is known to be good.

Everything that takes requests knows these types. Only `engine.input_processor` makes a `PreparedPrompt`, so that one is
proof: nobody looks at its tokens or its parameters again.
"""

from dataclasses import dataclass, field
from typing import TypedDict

from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str  # shares cached prefixes only with requests of the same salt


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: str  # only shown in the output
    cache_salt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt that this model can compute, with the sampling parameters that it was prepared for.

    Attributes:
        token_ids: at least one, all in the vocabulary, cut as the parameters say; they leave room for an output token.
        text: where there is one: as it was given, however the tokens are cut.
        params: the engine's own copy; they suit the model.
        cache_salt: cached prefixes are shared only with requests of the same salt.
        pools: one vector is wanted, and no tokens.
        bad_words: token ids of the parameters' own, in each of their spellings.
    """

    token_ids: list[int]
    text: str | None
    params: SamplingParams
    cache_salt: str | None = None
    pools: bool = False
    bad_words: list[list[int]] = field(default_factory=list)


def bad_prompt(message: str) -> InvalidRequestError:
    """The refusal of a prompt."""
    return InvalidRequestError(message, "prompt")


def prompt_too_long(length: int | str, limit: int, pools: bool = False) -> InvalidRequestError:
    """The refusal of a prompt of so many tokens, or "at least" so many, where the context has `limit`."""
    return InvalidRequestError(
        f"this model's maximum context length is {limit} tokens{'' if pools else ', of which the output needs one'}, "
        f"but the prompt has {length}. Shorten the prompt, or set truncate_prompt_tokens.",
        "prompt",
        "context_length_exceeded",
    )
