"""What the completion routes answer: OpenAI's objects and stream chunks, with vLLM's additions.

Fields that OpenAI requires are always written, null where there is nothing to say, and so are additions to a whole
answer, which clients read as attributes; chunks have additions only where asked for (UNSET leaves a field out). The
dialects fill them, msgspec encodes them. Knows no engine, only its outputs.
"""

from collections.abc import Iterable

import msgspec
from msgspec import UNSET, Struct, UnsetType

import quire
from quire.entrypoints.server.timings import Timings
from quire.entrypoints.server.turn import Turn
from quire.outputs import Logprob

SYSTEM_FINGERPRINT = f"quire-{quire.__version__}"
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity

PromptLogprobs = list[dict[int, Logprob] | None]
Head = tuple[str, int, str]  # id, creation and model of an answer: the first fields of its chunks, too


class _Answer(Struct):
    """What answers and chunks begin with: a `Head`."""

    id: str
    created: int  # seconds since 1970
    model: str


class PromptTokensDetails(Struct):
    cached_tokens: int  # taken from the prefix cache


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None

    @classmethod
    def of(cls, turn: Turn) -> "Usage":
        """A turn's so far; without details where it is not told what the cache had."""
        num_prompt, num_output, num_cached = turn.counts()
        details = None if num_cached is None else PromptTokensDetails(num_cached)
        return cls(num_prompt, num_output, num_prompt + num_output, details)


class CompletionLogprobs(Struct):
    """One entry per token in each list; the first token of an echoed prompt has no logprobs."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    token_ids: list[int] | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET


class CompletionResponse(_Answer):
    """An answer, and a chunk of a stream too: OpenAI gives both one shape."""

    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    object: str = "text_completion"
    timings: Timings | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(Struct):
    name: str | UnsetType = UNSET  # a stream has it with the first piece of the arguments only
    arguments: str = ""


class ToolCall(Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ToolCallPiece(Struct):
    """What a chunk brings of a call."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction | UnsetType = UNSET


class ChatMessage(Struct):
    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | None = None  # what the model thought, where a parser tells it apart
    reasoning: str | None = None  # the same, under a newer name


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatResponse(_Answer):
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str = SYSTEM_FINGERPRINT
    object: str = "chat.completion"
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    timings: Timings | UnsetType = UNSET


class ChatDelta(Struct):
    content: str | None | UnsetType = UNSET
    role: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(_Answer):
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


encode = msgspec.json.Encoder().encode


def token_name(token_id: int, text: str | None, as_id: bool) -> str:
    """How logprobs show a token."""
    return f"token_id:{token_id}" if as_id or text is None else text


def bounded(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def bounded_entries(entries: Iterable[dict[int, Logprob] | None]) -> PromptLogprobs:
    """Logprobs of a prompt's tokens, in vLLM's form."""
    return [
        None
        if entry is None
        else {i: Logprob(bounded(one.logprob), one.rank, one.decoded_token) for i, one in entry.items()}
        for entry in entries
    ]
