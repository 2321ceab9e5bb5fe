"""The routes that have the model write: completions, chat, Anthropic's messages; and what they would give the model.

`quire run-batch` has services of its own for completions, chat and vectors. /render is for who wants to see a
template's work, or to send the tokens elsewhere, count_tokens for who wants their number: the dialects read the bodies,
as for an answer.
"""

import asyncio
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.chat_request import ChatBatchRequest, ChatCompletionRequest
from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.dialects.chat import read_chat, read_chats
from quire.entrypoints.server.dialects.completions import read_completion
from quire.entrypoints.server.dialects.embeddings import read_classes, read_embedding, read_pooling, read_scores
from quire.entrypoints.server.dialects.messages import read_message
from quire.entrypoints.server.dialects.through_chat import validated
from quire.entrypoints.server.embedding_request import EmbeddingRequest, RerankRequest, ScoreRequest
from quire.entrypoints.server.event_service import EventService
from quire.entrypoints.server.messages_request import ConversationRequest, MessagesRequest
from quire.entrypoints.server.middleware import identify, outlet_of
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.service import Read, TurnService
from quire.entrypoints.server.sse import CONTENT_TYPES, respond
from quire.entrypoints.server.state import get_state
from quire.entrypoints.server.unknown_fields import warn_client
from quire.inputs import PreparedPrompt

router = APIRouter(route_class=JsonRoute)
_Body = TypeVar("_Body", ChatCompletionRequest, CompletionRequest)


@router.post("/v1/completions", tags=["completions"], responses=CONTENT_TYPES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Go on with one or more prompts."""
    return await respond(request, TurnService(get_state(request), read_completion, outlet_of(request.scope)), body)


@router.post("/v1/chat/completions", tags=["chat"], responses=CONTENT_TYPES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await respond(request, TurnService(get_state(request), read_chat, outlet_of(request.scope)), body)


@router.post("/v1/chat/completions/batch", tags=["chat"], responses=CONTENT_TYPES)  # as vLLM has it
async def create_chat_batch(body: ChatBatchRequest, request: Request) -> Response:
    """Answer several conversations, each by a choice of its own."""
    return await respond(request, TurnService(get_state(request), read_chats), body)


@router.post("/v1/messages", tags=["messages"], responses=CONTENT_TYPES)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await respond(request, EventService(get_state(request), read_message), body)


@router.post("/v1/embeddings", tags=["embeddings"])
async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
    """Texts as vectors."""
    return await respond(request, EventService(get_state(request), read_embedding), body)


@router.post("/pooling", include_in_schema=False)  # as vLLM has it
async def create_pooling(body: EmbeddingRequest, request: Request) -> Response:
    """Texts as vectors."""
    return await respond(request, EventService(get_state(request), read_pooling), body)


@router.post("/classify", tags=["scores"])  # as vLLM has it
async def create_classes(body: EmbeddingRequest, request: Request) -> Response:
    """How likely texts are of each class, by a model with a head for them."""
    return await respond(request, EventService(get_state(request), read_classes), body)


@router.post("/v1/score", tags=["scores"])
async def create_scores(body: ScoreRequest, request: Request) -> Response:
    """How well pairs of texts go together."""
    return await respond(request, EventService(get_state(request), read_scores), body)


@router.post("/v2/rerank", include_in_schema=False)  # Cohere's
@router.post("/v1/rerank", tags=["scores"])
async def create_reranking(body: RerankRequest, request: Request) -> Response:
    """Documents, the one first that answers a query best."""
    return await respond(request, EventService(get_state(request), read_scores), body)


@router.post("/invocations", include_in_schema=False)  # as SageMaker calls it
async def invoke(body: dict[str, Any], request: Request) -> Response:
    """Answer what the body's fields ask: a conversation, prompts, or for vectors, scores of pairs, or a reranking."""
    if "input" in body:
        return await create_embedding(validated(EmbeddingRequest, body), request)
    if "messages" in body:
        return await create_chat_completion(validated(ChatCompletionRequest, body), request)
    if "query" in body:
        return await create_reranking(validated(RerankRequest, body), request)
    if not body.keys().isdisjoint(("text_1", "queries", "data_1")):
        return await create_scores(validated(ScoreRequest, body), request)
    return await create_completion(validated(CompletionRequest, body), request)


class TokenCount(BaseModel):
    """The tokens of a prompt."""

    input_tokens: int


class Rendered(BaseModel):
    """One prompt."""

    request_id: str
    model: str
    prompt: str | None
    token_ids: list[int]
    sampling_params: dict[str, Any]


@router.post("/v1/messages/count_tokens", tags=["messages"])
async def count_tokens(body: ConversationRequest, request: Request) -> TokenCount:
    """The tokens of a conversation's prompt."""
    turn, _ = await read_message(get_state(request), body, identify(request.scope))
    return TokenCount(input_tokens=len(turn.prompts[0].token_ids))


@router.post("/v1/completions/render", tags=["completions"], response_model=list[Rendered])
async def render_completion(body: CompletionRequest, request: Request) -> Response:
    """The prompts of a completion request, with the sampling parameters that it would get."""
    return await _rendered(read_completion, body, request)


@router.post("/v1/chat/completions/render", tags=["chat"], response_model=Rendered)
async def render_chat(body: ChatCompletionRequest, request: Request) -> Response:
    """The prompt of a chat request, with the sampling parameters that it would get."""
    return await _rendered(read_chat, body, request)


async def _rendered(read: Read[_Body, Any], body: _Body, request: Request) -> Response:
    state = get_state(request)
    turn, _ = await read(state, body, identify(request.scope))
    model = state.check_model(body.model)

    def shown(prompt: PreparedPrompt) -> dict[str, Any]:
        text, tokenizer = prompt.text, state.llm.tokenizer
        if tokenizer is not None and (text is None or prompt.params.truncate_prompt_tokens):
            text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        params = {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(prompt.params).items()}
        told = {"prompt": text, "token_ids": prompt.token_ids, "sampling_params": params}
        return {"request_id": turn.request_id, "model": model, **told}

    def content() -> bytes:
        prompts = [shown(prompt) for prompt in turn.prompts]
        return encode(prompts[0] if isinstance(body, ChatCompletionRequest) else prompts)

    response = Response(await asyncio.to_thread(content), media_type="application/json")
    warn_client(response, body)
    return response
