"""/v1/completions/render and /v1/chat/completions/render: what the model would be given, and nothing is computed.

For who wants to see a template's work, or to send the tokens elsewhere. The dialects read the bodies, as for an answer.
"""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.dialects.chat import ChatDialect
from quire.entrypoints.server.dialects.completions import CompletionDialect
from quire.entrypoints.server.middleware import identify
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.service import TurnRequest
from quire.entrypoints.server.state import ServerState, get_state
from quire.entrypoints.server.unknown_fields import warn_client
from quire.inputs import PreparedPrompt

router = APIRouter(route_class=JsonRoute)


class Rendered(BaseModel):
    """One prompt."""

    request_id: str
    model: str
    prompt: str | None
    token_ids: list[int]
    sampling_params: dict[str, Any]


@router.post("/v1/completions/render", tags=["completions"], response_model=list[Rendered])
async def render_completion(body: CompletionRequest, request: Request) -> Response:
    """The prompts of a completion request, with the sampling parameters that it would get."""
    state = get_state(request)
    turn, _ = await CompletionDialect(state).read(body, identify(request.scope).decode("latin-1"))
    return await _response(state, turn, body, False)


@router.post("/v1/chat/completions/render", tags=["chat"], response_model=Rendered)
async def render_chat(body: ChatCompletionRequest, request: Request) -> Response:
    """The prompt of a chat request, with the sampling parameters that it would get."""
    state = get_state(request)
    turn, _ = await ChatDialect(state, prompt_only=True).read(body, identify(request.scope).decode("latin-1"))
    return await _response(state, turn, body, True)


async def _response(
    state: ServerState, turn: TurnRequest, body: ChatCompletionRequest | CompletionRequest, is_chat: bool
) -> Response:
    def content() -> bytes:
        model = state.check_model(body.model)
        prompts = [_rendered(state, turn.request_id, model, prompt) for prompt in turn.prompts]
        return encode(prompts[0] if is_chat else prompts)

    response = Response(await asyncio.to_thread(content), media_type="application/json")
    warn_client(response, body)
    return response


def _rendered(state: ServerState, request_id: str, model: str, prompt: PreparedPrompt) -> dict[str, Any]:
    text, tokenizer = prompt.text, state.llm.tokenizer
    if tokenizer is not None and (text is None or prompt.params.truncate_prompt_tokens):
        text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    params = {name: msgspec.to_builtins(value) for name, value in msgspec.structs.asdict(prompt.params).items()}
    return {
        "request_id": request_id,
        "model": model,
        "prompt": text,
        "token_ids": prompt.token_ids,
        "sampling_params": params,
    }
