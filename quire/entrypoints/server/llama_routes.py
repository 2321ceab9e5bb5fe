"""llama.cpp's own routes: /completion, and what its clients ask about a server."""

from typing import Any

from fastapi import APIRouter, Request, Response

import quire
from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.dialects.chat import read_chat
from quire.entrypoints.server.dialects.embeddings import read_llama_embedding
from quire.entrypoints.server.dialects.llama_cpp import read_llama
from quire.entrypoints.server.event_service import EventService
from quire.entrypoints.server.llama_requests import LlamaCompletionRequest, LlamaEmbeddingRequest
from quire.entrypoints.server.middleware import identify
from quire.entrypoints.server.sse import CONTENT_TYPES, event, respond
from quire.entrypoints.server.state import ServerState, State, get_state
from quire.entrypoints.server.unknown_fields import warn_client


class LlamaRoute(JsonRoute):
    """Its users send JSON with curl's -d."""

    takes_any_type = True


router = APIRouter(route_class=LlamaRoute, tags=["llama.cpp"])


@router.post("/completion", responses=CONTENT_TYPES)
async def complete(body: LlamaCompletionRequest, request: Request) -> Response:
    """Go on with one or more prompts."""
    return await respond(request, EventService(get_state(request), read_llama, event), body)


@router.post("/embedding")
async def embed(body: LlamaEmbeddingRequest, request: Request) -> Response:
    """Texts as vectors."""
    return await respond(request, EventService(get_state(request), read_llama_embedding), body)


@router.post("/apply-template")
async def apply_template(body: ChatCompletionRequest, request: Request, response: Response) -> dict[str, str]:
    """The prompt that the chat template makes of a conversation."""
    turn, _ = await read_chat(get_state(request), body, identify(request.scope))
    warn_client(response, body)
    return {"prompt": turn.prompts[0].text or ""}


@router.get("/props")
async def props(state: State) -> dict[str, Any]:
    """The server's settings."""
    tokenizer, config = state.llm.tokenizer, state.llm.config
    special = {} if tokenizer is None else tokenizer.special_tokens_map
    params = config.default_sampling_params()
    shown = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")}
    return {
        "default_generation_settings": {"id": 0, "n_ctx": config.model.max_model_len, "params": shown},
        "total_slots": _num_slots(state),
        "model_path": config.model.model,
        "model_alias": state.model_names[0],
        "chat_template": "" if tokenizer is None else tokenizer.chat_template or "",
        "bos_token": special.get("bos_token") or "",
        "eos_token": special.get("eos_token") or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"quire {quire.__version__}",
    }


@router.get("/slots")
async def slots(state: State) -> list[dict[str, Any]]:
    """The sequences that may run at once. They have no fixed places here: the first ones stand for those that run."""
    num_running = sum(stats.num_requests_running for stats in state.engine_stats())
    length, speculates = state.llm.config.model.max_model_len, state.llm.config.speculative is not None
    return [
        {"id": place, "n_ctx": length, "speculative": speculates, "is_processing": place < num_running}
        for place in range(_num_slots(state))
    ]


def _num_slots(state: ServerState) -> int:
    return state.llm.limits.max_num_seqs * state.llm.config.args.data_parallel_size
