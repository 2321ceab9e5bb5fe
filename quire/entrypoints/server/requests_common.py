"""What completion and chat requests have in common: the fields, their types and bounds, and what is refused by name.

Fields left out, or null, take vLLM's defaults. Validation is strict: no bool passes for a number, no
fraction for an integer. Rules between fields, and those that depend on the model, are for `sampling` to check. Knows no
engine.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator, WithJsonSchema

from quire.entrypoints.server.errors import quote
from quire.errors import InvalidRequestError

MAX_CHOICES = 128  # n and best_of over HTTP
MAX_STOPS = 64  # lm-evaluation-harness sends all that a task has; OpenAI itself takes 4
MAX_BAD_WORDS = 128
MAX_WORD_CHARS = 1000  # of a stop string or a bad word
MAX_BIASES = 1024
MAX_TOKEN_IDS = 8192  # allowed_token_ids and stop_token_ids
MAX_PARTS = 16384  # messages of a conversation, and parts of a message
MAX_OBJECTS = 4096  # tools, documents, and tool calls of a message
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]
# fail_fast: millions of wrong items must not become millions of errors.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_OBJECTS)]
_Biases = Annotated[dict[str, float], Field(max_length=MAX_BIASES)]
_StopSchema = Word | Annotated[list[Word], Field(max_length=MAX_STOPS)] | None


def refuse(reason: str, *harmless: object) -> BeforeValidator:
    """Marks a field that the API names and this server lacks: only null, and values that ask for nothing, pass."""

    def check(value: object) -> None:
        # False and 0 are equal, and not the same.
        same_kind = (h for h in harmless if isinstance(h, bool) == isinstance(value, bool))
        if value is not None and value not in same_kind:
            raise ValueError(reason)

    return BeforeValidator(check, json_schema_input_type=Annotated[Any, WithJsonSchema({"enum": [None, *harmless]})])


def _read_stops(value: Any) -> list[str] | None:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"has {len(stops)} texts; at most {MAX_STOPS} are taken")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_WORD_CHARS:
            raise ValueError(f"a text must have from 1 to {MAX_WORD_CHARS} characters; one has {len(stop)}")
    return stops


Stops = Annotated[list[str] | None, PlainValidator(_read_stops, json_schema_input_type=_StopSchema)]


def _check_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries; at most {MAX_BIASES} are taken")
    for key in value if isinstance(value, dict) else ():
        if not (isinstance(key, str) and key.isdecimal() and len(key) <= 10):
            raise ValueError(f"keys must be token ids in decimal, not {key!r:.40}")
    return value


def _check_printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must have printable characters only; leave the others out")
    return value


def wrong(field: str, rule: str, value: object, param: str | None = None) -> InvalidRequestError:
    """The refusal of a value that a rule forbids; `param`: the field that is named as the one at fault, if another."""
    return InvalidRequestError(f"{field} must be {rule}; it is {quote(value)}.", param or field)


def field_text(item: Mapping[str, Any], name: str, where: str) -> str:
    """The text that an object has under a name; InvalidRequestError where it has none. `where` it is in the request."""
    if not isinstance(value := item.get(name), str):
        raise wrong(f"{where}.{name}", "a text", value)
    return value


def conversation_of(messages: Sequence[dict[str, Any]], param: str, call: str, result: str) -> list[dict[str, Any]]:
    """A chat's messages as templates want them: results of tools name their functions, and the system speaks first.

    What it says later on, as coding agents have it do, belongs to the turn before it, or after an assistant's to the
    user's that follows: many templates refuse, or drop, a system's message that is not the first.

    Args:
        param, call, result: what the request's API calls the messages, a call and its result.

    Raises:
        InvalidRequestError: a result of a call that does not come before it.
    """
    names: dict[str, str] = {}
    turns: list[dict[str, Any]] = []
    joined: dict[int, list[str]] = {}  # place of a turn -> the texts that its content is put together from, at the end
    told = False  # the last thing was the system's, in a user's turn
    for message in messages:
        names |= {one["id"]: one["function"]["name"] for one in message.get("tool_calls", ())}
        if message["role"] == "tool":
            if (call_id := message["tool_call_id"]) not in names:
                raise InvalidRequestError(f"{param}: no {call} comes before the {result} of {quote(call_id)}.", param)
            message["name"] = names[call_id]
        is_systems = message["role"] in ("system", "developer")
        if turns and (turns[-1]["role"] != "assistant" if is_systems else told and message["role"] == "user"):
            texts = joined.setdefault(len(turns) - 1, [content_text(turns[-1]["content"])])
            texts.append(content_text(message["content"]))
        else:
            turns.append({**message, "role": "user"} if is_systems and turns else message)
        told = is_systems and turns[-1]["role"] == "user"
    for place, texts in joined.items():
        turns[place]["content"] = "\n\n".join(filter(None, texts))
    return turns


def content_text(content: str | Sequence[str | dict[str, Any]] | None) -> str:
    """A message's content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part if isinstance(part, str) else part.get("text", "") for part in content)


NO_SAMPLER = "this sampler is not there; leave it out"


class Fields(BaseModel, use_attribute_docstrings=True, strict=True, extra="allow", allow_inf_nan=False):
    """Of a body, or of an object in one. A client's further fields are kept, for `unknown_fields` to tell about."""


# Of `LlamaSampling`, in OpenAI's names too.
SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")


class LlamaSampling(Fields):
    """How to draw, in the names of llama.cpp, which are Ollama's too."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """-1: another one each time."""
    stop: Stops = None

    # Refused.
    typical_p: Annotated[None, refuse(NO_SAMPLER, 1, 1.0)] = None
    mirostat: Annotated[None, refuse(NO_SAMPLER, 0)] = None

    def openai_fields(self) -> dict[str, Any]:
        """The same in OpenAI's names."""
        return {name: getattr(self, name) for name in SAME} | {"repetition_penalty": self.repeat_penalty}


class StreamOptions(Fields):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    """One more chunk at the end, with the usage."""
    continuous_usage_stats: bool | None = None
    """The usage so far on every chunk; only with include_usage."""
    include_obfuscation: Annotated[None, refuse("chunks are not padded against analysis; leave it out", False)] = None


class AnyRequest(Fields):
    """What every request to write has."""

    model: str | None = None
    """A name of /v1/models; the first one if left out or empty."""
    stream: bool | None = None


class GenerationRequest(AnyRequest):
    """Fields of both kinds of OpenAI's requests."""

    stream_options: StreamOptions | None = None
    """Only with stream."""

    # Sampling, under OpenAI's names.
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Choices for each prompt."""
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=_INT64_MIN, le=2**64 - 1)
    stop: Stops = None
    logit_bias: Annotated[_Biases | None, BeforeValidator(_check_biases)] = None
    """Token id -> added to its logit, within [-100, 100]."""

    # Sampling, beyond OpenAI's.
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Draw so many and return the n likeliest; not in a stream."""
    use_beam_search: bool | None = None
    """Keep best_of (or n) beams and return the n best; temperature is 0 then, and nothing streams."""
    length_penalty: float | None = Field(None, ge=-10, le=10)
    """Beams are ranked by their logprob / tokens ** length_penalty; 1 by default."""
    early_stopping: bool | Literal["never"] | None = None
    """When a beam search may end: at enough ended beams, or (never) when none can get better."""
    top_k: int | None = Field(None, ge=-1, le=_INT64_MAX)
    """0 and -1: all tokens."""
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    stop_token_ids: TokenIds | None = None
    bad_words: Annotated[list[Word], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=-1)
    """Logprobs of the prompt's tokens; not in a stream."""

    # The prompt.
    echo: bool | None = None
    """Begin the answer with the prompt (chat: with the last message)."""
    add_special_tokens: bool | None = None
    """By default true for completions, false for chat."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep the last k; -1: what the context holds beside the answer."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Share cached prefixes only with requests of the same salt."""

    # How it is run and shown.
    priority: int | None = Field(None, ge=_INT64_MIN, le=_INT64_MAX)
    """Lower runs first."""
    speculative: bool | None = None
    """False: without drafts, where the server makes any."""
    ttft_target: float | None = Field(None, gt=0, le=1000000.0)
    """Seconds to the first token, or 503 at once."""
    tpot_target: float | None = Field(None, gt=0, le=1000000.0)
    """Seconds between tokens, or 503 at once."""
    user: str | None = None
    """Whose request it is, for fair shares; an API key says it instead."""
    request_id: Annotated[str, AfterValidator(_check_printable)] | None = Field(None, min_length=1, max_length=200)
    """Part of the answer's id; of printable characters."""
    return_token_ids: bool | None = None
    timings: bool | None = None
    """End the answer with where its time went, as llama.cpp does."""
    return_tokens_as_token_ids: bool | None = None
    """Tokens in logprobs as 'token_id:ID'."""

    # Accepted, and of no effect here: they are for OpenAI's own accounts, billing and caches.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    # What the output must look like; one of these.
    response_format: dict[str, Any] | None = None
    """Of type text, json_object, json_schema (it holds, strict or not) or structural_tag."""
    structured_outputs: dict[str, Any] | None = None
    """One of json, regex, choice, grammar, json_object and structural_tag, as vLLM has them."""
    structural_tag: str | dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar: str | None = None
    """Lark, or GBNF."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    """Of no effect: there is one."""

    # Refused.
    moderation: Annotated[None, refuse("not supported by this server; leave it out")] = None

    def force_usage(self, always: bool) -> None:
        """Have a stream end with its usage, whether it asked for that or not, where that is `always` so."""
        if always and self.stream:
            given = self.stream_options or StreamOptions.model_validate({})
            self.stream_options = given.model_copy(update={"include_usage": True})

    @property
    def wants_final_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.wants_final_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def shows_token_ids(self, default: bool) -> bool:
        """Whether logprobs name tokens by id, where that is the server's `default`."""
        return default if self.return_tokens_as_token_ids is None else self.return_tokens_as_token_ids
