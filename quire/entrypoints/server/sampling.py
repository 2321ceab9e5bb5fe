"""From a request's fields to what the engine takes: sampling parameters, and a prompt that fits in the context.

The services call it before anything is queued, so that a request breaks a rule before it costs anything. An error's
`param` is the HTTP field's name. Rules of single fields are in the request models, SamplingParams' own rules there.
"""

import copy
import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from quire.engine.async_llm import AsyncLLM
from quire.engine.terms import MAX_CLIENT, check_terms
from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.requests_common import GenerationRequest
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.structure import names_of, structure_of
from quire.errors import InvalidRequestError
from quire.inputs import PreparedPrompt, PromptType
from quire.protocol.requests import Terms
from quire.sampling_params import RequestOutputKind, SamplingParams, SamplingType

DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it
# Fields that mean the same here and there.
_SAME = sorted(GenerationRequest.model_fields.keys() & set(SamplingParams.__struct_fields__) - {"structured_outputs"})


def completion_params(body: CompletionRequest, llm: AsyncLLM) -> SamplingParams:
    """The sampling parameters of a completion request.

    With `max_tokens` 0 the engine draws one token, as it must, which is for the caller to drop.

    Raises:
        InvalidRequestError: a rule between fields, or a limit of the model or the engine, is broken.
    """
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("max_tokens must be at least 1, or 0 with echo; it is 0.", "max_tokens")
    max_tokens = None if body.max_tokens == -1 else body.max_tokens
    if body.max_tokens is None:  # the model's own default may only lower it: it is meant for whole answers
        max_tokens = min(DEFAULT_MAX_TOKENS, llm.get_default_sampling_params().max_tokens or DEFAULT_MAX_TOKENS)
    given: dict[str, Any] = {"max_tokens": None if max_tokens is None else max(1, max_tokens)}
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo:
            given["prompt_logprobs"] = body.logprobs
    return _params(body, llm, given, {})


def chat_params(body: ChatCompletionRequest, llm: AsyncLLM) -> SamplingParams:
    """The sampling parameters of a chat request.

    Raises:
        InvalidRequestError: a rule between fields, or a limit of the model or the engine, is broken.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true.", "top_logprobs")
    given: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    field, max_tokens = body.output_limit()
    if max_tokens is not None or "max_new_tokens" not in llm.config.model.generation_defaults:
        given["max_tokens"] = max_tokens
    return _params(body, llm, given, {"logprobs": "top_logprobs", "max_tokens": field})


def terms_of(body: GenerationRequest, llm: AsyncLLM) -> Terms:
    """On what terms a request asks to be served; its `user` is its client.

    Raises:
        InvalidRequestError: terms that the engine's scheduling policy does not know.
    """
    terms = Terms(body.priority or 0, client_name(body.user), body.ttft_target, body.tpot_target)
    check_terms(terms, llm.limits.policy)
    return terms


def client_name(user: str | None) -> str | None:
    """Whom the scheduler knows a `user` as."""
    if user is None or len(user) <= MAX_CLIENT:
        return user or None
    return hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()


def _params(
    body: GenerationRequest, llm: AsyncLLM, given: dict[str, Any], http_names: Mapping[str, str]
) -> SamplingParams:
    """The model's defaults, what the body says, and `given`, checked; no more tokens than the operator allows."""
    _check_stream(body)
    terms_of(body, llm)  # before any work is done for it
    same = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    args, defaults = llm.config.args, llm.config.model.generation_defaults
    # As in vLLM max_new_tokens is a default where the model itself has it, and a limit where options have it.
    limits = (args.override_generation_config or {}) if args.generation_config in ("auto", "vllm") else defaults
    if limit := limits.get("max_new_tokens"):
        given["max_tokens"] = min(given.get("max_tokens") or limit, limit)
    if body.use_beam_search:  # what the model has besides a length is about drawing
        defaults = {"temperature": 0.0, "max_new_tokens": defaults.get("max_new_tokens")}
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    given["structured_outputs"] = structure_of(body)
    with named(http_names):
        return SamplingParams.from_generation_defaults(defaults, output_kind=kind, **(given | same))


def _for_prompt(params: SamplingParams, room: int) -> SamplingParams:
    """The parameters of one prompt: with a seed of its own, if the request has none.

    The engine would make one of the request's id otherwise, and what a client calls its requests must not decide what
    they draw: a proxy may give one name to many.

    Args:
        room: tokens of the context that the answer leaves, which are what -1 keeps of the prompt.
    """
    params = copy.copy(params)
    if params.sampling_type == SamplingType.RANDOM:
        params.seed = secrets.randbits(64)
    if params.truncate_prompt_tokens == -1 and room > 0:
        params.truncate_prompt_tokens = room
    return params


def check_size(
    body: CompletionRequest | ChatCompletionRequest, params: SamplingParams, lengths: Sequence[int], state: ServerState
) -> None:
    """Check what the answer may hold at most: so many tokens with their ids or logprobs, each alternative counted.

    The text of tokens that the engine draws is free: to draw them costs more. `lengths`: the prompts' tokens.

    Raises:
        InvalidRequestError: more than the server's max_answer_entries.
    """
    model, is_chat = state.llm.config.model, isinstance(body, ChatCompletionRequest)
    num, most = len(lengths), state.args.max_body_bytes  # of what the engine is told, where each prompt has its own
    if num > 1 and (told := num * len(msgspec.msgpack.encode(params))) > most:
        message = f"the parameters of {num} prompts take {told} bytes, and {most} is the most; send fewer."
        raise InvalidRequestError(message, "messages" if is_chat else "prompt")
    each = _alternatives(params.logprobs, model.vocab_size)
    of_prompt = _alternatives(body.prompt_logprobs, model.vocab_size) + bool(body.return_token_ids)
    if not is_chat:  # for each of its choices
        of_prompt = params.n * (of_prompt + (max(1, each) if body.echo else 0))
    of_output = params.n * (each + bool(body.return_token_ids))
    rooms = (min(params.max_tokens or model.max_model_len, model.max_model_len - length) for length in lengths)
    num_entries = sum(lengths) * of_prompt + sum(rooms) * of_output
    if num_entries <= (most := state.args.max_answer_entries):
        return
    top = "top_logprobs" if is_chat else "logprobs"
    param = "n" if params.n > 1 else top if each > of_prompt else "prompt_logprobs"
    raise InvalidRequestError(
        f"the answer could hold {num_entries} tokens and alternatives to them (prompts x n x tokens x logprobs: "
        f"{len(lengths)} prompts of {sum(lengths)} tokens, n = {params.n}), and {most} is the most that this server "
        f"gives at once. Lower n, max_tokens, {top} or prompt_logprobs, or send fewer prompts.",
        param,
    )


def _alternatives(num_logprobs: int | None, vocab_size: int) -> int:
    """Entries for a token of which so many logprobs are shown."""
    return 0 if num_logprobs is None else 1 + (vocab_size if num_logprobs == -1 else num_logprobs)


def _check_stream(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true.", "stream_options")
    if not body.stream:
        return
    draws_more = body.best_of is not None and body.best_of > (body.n or 1)
    if body.use_beam_search or draws_more:
        param, value = ("use_beam_search", "") if body.use_beam_search else ("best_of", f" {body.best_of}")
        reason = "can't be streamed, as what is best is known at the end only; set stream: false."
        raise InvalidRequestError(f"{param}{value} {reason}", param)
    if body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs can't be streamed; set stream: false.", "prompt_logprobs")


async def prepared_prompt(
    llm: AsyncLLM, prompt: str | list[int], params: SamplingParams, body: CompletionRequest | ChatCompletionRequest
) -> PreparedPrompt:
    """The prompt as the engine takes it, encoded and cut as the body says, with parameters of its own.

    Raises:
        InvalidRequestError: it is too long for the context, or leaves too little room for the tokens asked for; it
            can't be encoded; or the model can't serve the parameters.
    """
    is_chat = isinstance(body, ChatCompletionRequest)
    limit, (limit_field, max_tokens) = llm.config.model.max_model_len, body.output_limit()
    names = {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": limit_field} if is_chat else {}
    names |= names_of(body)
    special = not is_chat if body.add_special_tokens is None else body.add_special_tokens
    given: PromptType = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    if body.cache_salt is not None:
        given["cache_salt"] = body.cache_salt
    with named(names):
        prepared = await llm.prepare(given, _for_prompt(params, limit - max(1, max_tokens or 1)), special)
    length = len(prepared.token_ids)
    if max_tokens is not None and length + max_tokens > limit:
        fault = f"the prompt has {length} and {limit_field} asks for {max_tokens} more"
        remedy = f"Lower {limit_field} to {limit - length} or less, or shorten the prompt."
        message = f"this model's maximum context length is {limit} tokens, but {fault}. {remedy}"
        raise InvalidRequestError(message, limit_field, "context_length_exceeded")
    return prepared


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Within, a refusal calls the engine's parameters by the names of HTTP fields."""
    try:
        yield
    except InvalidRequestError as error:
        own = error.param or ""
        if own not in names:
            raise
        # Where a message begins with the name, it is about the parameter's value; or it is about a part of that.
        message = re.sub(rf"^{own}\b(\.\w+\b(?= must))?", names[own], str(error))
        raise InvalidRequestError(message, names[own], error.code) from None
