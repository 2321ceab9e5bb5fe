"""Routes that tell about the server: models, tokenizer, health, version, load and metrics.

They are small and answer at once; only /tokenize and /detokenize have bodies.
"""

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

import quire
from quire.entrypoints.server import info_requests as forms
from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.prometheus import render
from quire.entrypoints.server.prompts import conversation_text
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.sse import JsonParts
from quire.entrypoints.server.state import ServerState, State
from quire.entrypoints.server.unknown_fields import warn_client
from quire.errors import EngineDeadError, InvalidRequestError
from quire.text.tokenizer import Tokenizer

_OF_CHAT = ("chat_template", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_PART = 1 << 16  # entries of a list that are encoded at a time: a millisecond's worth

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/models", tags=["models"])
async def list_models(state: State) -> forms.ModelList:
    """The names that the model goes by, or the models with their state."""
    return forms.ModelList(data=[state.card(name) for name in state.names])


@router.get("/v1/models/{model:path}", tags=["models"])
async def get_model(model: str, state: State) -> forms.ManagedModelCard | forms.ModelCard:
    """One of them."""
    return state.card(state.check_model(model))


@router.post("/tokenize", tags=["tokenizer"], response_model=forms.TokenizeResponse)
async def tokenize(body: forms.TokenizeRequest, state: State) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    state.admit(body)
    tokenizer, of_chat = _tokenizer(state), forms.is_chat(body)
    options = {name: getattr(body, name) for name in _OF_CHAT}
    text = await conversation_text(state, body.messages, **options) if of_chat else body.prompt
    ids = await state.llm.token_ids(text, not of_chat if body.add_special_tokens is None else body.add_special_tokens)
    strings = await asyncio.to_thread(tokenizer.convert_ids_to_tokens, ids) if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": state.llm.config.model.max_model_len}
    response = JsonParts(await _encode_with_lists(answer, tokens=ids, token_strs=strings))
    warn_client(response, body)
    return response


async def _encode_with_lists(answer: dict[str, Any], **lists: list[Any] | None) -> list[bytes]:
    """The JSON of `answer` and `lists` in parts: of millions of tokens each is encoded, and sent, by itself."""
    parts = [encode(answer)[:-1]]
    for name, entries in lists.items():
        parts[-1] += b",%b:%b" % (encode(name), b"null" if entries is None else b"[")
        for start in range(0, len(entries or ()), _PART):
            if start:
                await asyncio.sleep(0)  # others' turn
            parts.append(b"," * (start > 0) + encode((entries or [])[start : start + _PART])[1:-1])
        parts[-1] += b"" if entries is None else b"]"
    parts[-1] += b"}"
    return parts


@router.post("/detokenize", tags=["tokenizer"])
async def detokenize(body: forms.DetokenizeRequest, state: State, response: Response) -> forms.DetokenizeResponse:
    """The text of token ids, special tokens included."""
    state.admit(body)
    warn_client(response, body)
    size = state.llm.config.model.vocab_size
    if (largest := max(body.tokens, default=0)) >= size:
        raise InvalidRequestError(f"token id {largest} is out of the vocabulary, 0 to {size - 1}.", "tokens")
    text = await asyncio.to_thread(_tokenizer(state).decode, body.tokens, skip_special_tokens=False)
    return forms.DetokenizeResponse(prompt=text, content=text)


@router.get("/tokenizer_info", tags=["tokenizer"])
async def tokenizer_info(state: State) -> forms.TokenizerInfo:
    """Special tokens, sizes and chat template."""
    tokenizer = _tokenizer(state)
    named = tokenizer.special_tokens_map
    return forms.TokenizerInfo(
        tokenizer_class="fast" if tokenizer.is_fast else "sentencepiece",
        vocab_size=len(tokenizer.get_vocab()),
        model_max_length=state.llm.config.model.max_model_len,
        **{name: named.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
        additional_special_tokens=[t for t in tokenizer.all_special_tokens if t not in named.values()],
        chat_template=tokenizer.chat_template,
    )


def _tokenizer(state: ServerState) -> Tokenizer:
    if state.llm.tokenizer is None:
        raise InvalidRequestError("this server has no tokenizer (skip_tokenizer_init): it takes token ids only.")
    return state.llm.tokenizer


@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False, tags=["server"])  # as SageMaker calls it
@router.get("/health", tags=["server"], response_class=Response, responses={503: {"description": "It is dead."}})
async def health(state: State) -> Response:
    """200 while the engine is alive."""
    try:
        await state.check_health()
    except EngineDeadError:
        return Response(status_code=503)
    return Response()


@router.get("/api/version", tags=["ollama"])
@router.get("/version", tags=["server"])
async def version() -> dict[str, str]:
    """The version of Quire."""
    return {"version": quire.__version__}


@router.get("/load", tags=["server"])
async def load(state: State) -> forms.Load:
    """How busy the server is; what asks for its state is not counted."""
    return forms.Load(server_load=state.num_in_flight)


@router.get("/metrics", tags=["server"], response_class=PlainTextResponse)
async def metrics(state: State, request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus' text form."""
    body, media_type = render(state.figures(), request.app.state.http, time.monotonic())
    return Response(body, media_type=media_type)
