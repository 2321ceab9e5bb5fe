"""Ollama's routes: /api/chat and /api/generate, and what its clients ask about a server and its models."""

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.config.gguf import weight_files
from quire.entrypoints.server import ollama_requests as forms
from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.dialects.embeddings import read_ollama_embed
from quire.entrypoints.server.dialects.ollama import line, loaded, read_ollama
from quire.entrypoints.server.event_service import EventService
from quire.entrypoints.server.requests_common import AnyRequest
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.room import num_parameters
from quire.entrypoints.server.sse import content_types, respond
from quire.entrypoints.server.state import ServerState, State, get_state

_STREAM = "application/x-ndjson"
_CONTENT_TYPES = content_types(_STREAM)
_LATEST = ":latest"  # the tag of a name without one


class OllamaRoute(JsonRoute):
    """Its users send JSON with curl's -d, and models' names with tags."""

    takes_any_type = True

    def prepare(self, body: dict[str, Any], names: Sequence[str]) -> None:
        body["model"] = given = body.get("model", body.get("name"))
        if isinstance(given, str) and given not in names and (plain := given.removesuffix(_LATEST)) in names:
            body["model"] = plain


router = APIRouter(route_class=OllamaRoute, tags=["ollama"], prefix="/api")


@router.post("/chat", responses=_CONTENT_TYPES)
async def chat(body: forms.OllamaChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await _answer(body, request, not body.messages)


@router.post("/generate", responses=_CONTENT_TYPES)
async def generate(body: forms.OllamaGenerateRequest, request: Request) -> Response:
    """Answer a prompt."""
    return await _answer(body, request, not body.prompt)


async def _answer(body: forms.OllamaQuestion, request: Request, asks_nothing: bool) -> Response:
    state = get_state(request)
    if asks_nothing:
        return Response(encode(loaded(body, state.check_model(body.model))), media_type="application/json")
    return await respond(request, EventService(state, read_ollama, line), body, _STREAM)


@router.post("/embed")
async def embed(body: forms.OllamaEmbedRequest, request: Request) -> Response:
    """Texts as vectors of length 1."""
    return await respond(request, EventService(get_state(request), read_ollama_embed), body)


@router.post("/embeddings")
async def embed_one(body: forms.OllamaOldEmbedRequest, request: Request) -> Response:
    """One text as a vector."""
    return await respond(request, EventService(get_state(request), read_ollama_embed), body)


@router.get("/tags")
async def tags(state: State) -> dict[str, Any]:
    """The models that may be asked for."""
    return {"models": [await _entry(state, name) for name in state.names]}


@router.get("/ps")
async def running(state: State) -> dict[str, Any]:
    """The models that are loaded."""
    names = [name for name in state.names if state.loaded(name) is not None]
    never = {"size_vram": 0, "expires_at": "9999-12-31T23:59:59Z"}
    known = [{**await _entry(state, n), **never, "context_length": state.card(n).max_model_len} for n in names]
    return {"models": known}


@router.post("/show", tags=["models"])
async def show(body: AnyRequest, state: State) -> dict[str, Any]:
    """What a model is."""
    name = state.check_model(body.model)
    own, details = state.loaded(name), (await _entry(state, name))["details"]
    known = {"modelfile": f"FROM {state.card(name).root}", "details": details}
    if own is None:
        return {**known, "parameters": "", "template": "", "model_info": {}, "capabilities": ["completion"]}
    config, tokenizer = own.llm.config.model, own.llm.tokenizer
    family, template = config.model_type, "" if tokenizer is None else str(tokenizer.chat_template or "")
    sizes = {
        "context_length": config.max_model_len,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
    }
    info = {"general.architecture": family} | {f"{family}.{name}": size for name, size in sizes.items()}
    can = ["completion", *(["tools"] if "tools" in template else []), *(["thinking"] if "think" in template else [])]
    known["parameters"] = f"num_ctx {config.max_model_len}"  # where Continue looks for it
    return {**known, "template": template, "model_info": info, "capabilities": can}


async def _entry(state: ServerState, name: str) -> dict[str, Any]:
    """A model as lists show it."""
    card, own = state.card(name), state.loaded(name)
    config = None if own is None else own.llm.config.model
    files = [] if config is None else weight_files(config.path)
    family = [] if config is None else [config.model_type]
    hides_shapes = config is None or (config.path.is_dir() and "quantization_config" in config.hf_config)  # in codes
    quantization = None if own is None else own.llm.config.quantization or own.llm.config.model.dtype
    size = "" if config is None or hides_shapes else _in_short(await asyncio.to_thread(num_parameters, config.path))
    shown = name if ":" in name else name + _LATEST
    return {
        "name": shown,
        "model": shown,
        "modified_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "size": getattr(card, "size", None) or sum(file.stat().st_size for file in files),
        "digest": hashlib.sha256(card.root.encode()).hexdigest(),
        "details": {
            "parent_model": card.parent or "",
            "format": "gguf" if files and files[0].suffix == ".gguf" else "safetensors",
            "family": "".join(family),
            "families": family,
            "parameter_size": size,
            "quantization_level": quantization or "",
        },
    }


def _in_short(number: int) -> str:
    """As Ollama writes it: 8B, 7.6B, 595.78M, 135K; nothing where it is not known."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if number >= size:
            return f"{number / size:.{digits if number % size else 0}f}{unit}"
    return str(number or "")
