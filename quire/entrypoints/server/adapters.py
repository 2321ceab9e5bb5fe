"""Adapters of either kind by name: those of the start, and the routes that load and unload others, with vLLM's bodies.

A request whose `model` is an adapter's name runs with it. What clients load has to lie below `--allowed-adapter-dir`.
"""

import asyncio
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.options import ServerArgs
from quire.entrypoints.server.state import ServerState, State
from quire.errors import ConfigError, InvalidRequestError, QuireError
from quire.lora.request import AdapterRequest, LoRARequest, PromptAdapterRequest
from quire.models.peft import CONFIG, WEIGHTS, num_virtual_tokens
from quire.utils.logs import logger

router = APIRouter(route_class=JsonRoute)
_ids = itertools.count(1)


def read_modules(args: ServerArgs, names: Sequence[str]) -> dict[str, AdapterRequest]:
    """The adapters that there are from the start, "name=path" or JSON each, by name; what they are is read.

    Raises:
        ConfigError: a text of neither form, a name that is taken, or a configuration that can't be used.
    """
    found: dict[str, AdapterRequest] = {}
    given = {"lora_modules": args.lora_modules or (), "prompt_adapters": args.prompt_adapters or ()}
    for option, text in ((option, text) for option, texts in given.items() for text in texts):
        try:
            told = json.loads(text) if text.startswith("{") else None
            name, path = text.split("=", 1) if told is None else (str(told["name"]), str(Path(told["path"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            form = 'name=path, or {"name": ..., "path": ...}'
            raise ConfigError(f"{option} has {text[:80]!r}; an adapter is given as {form}.") from None
        if name in found or name in names:
            raise ConfigError(f"{option}: the name {name!r} is taken; give each adapter one of its own.")
        try:
            found[name] = _request(name, path)
        except InvalidRequestError as error:
            raise ConfigError(f"{option}: {error}") from None
    return found


async def load_modules(state: ServerState) -> None:
    """Have the adapters that there are from the start loaded before they are asked for; one that fails is logged."""
    for request in [*state.adapters.values()]:
        try:
            await state.llm.add_lora(request)
        except QuireError as error:
            logger.error("%s", error)  # and who asks for it is told, too


class LoadRequest(BaseModel, strict=True):
    """An adapter to be loaded."""

    lora_name: str = Field(min_length=1, max_length=200, description="The model's name for requests.")
    lora_path: str = Field(min_length=1, description="Its folder, below --allowed-adapter-dir.")
    load_inplace: bool = Field(False, description="Take the place of an adapter of this name; its requests go on.")


class UnloadRequest(BaseModel, strict=True):
    """An adapter that requests may name no more."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None


@router.post("/v1/load_lora_adapter", tags=["models"], response_class=PlainTextResponse)
async def load_adapter(body: LoadRequest, state: State) -> PlainTextResponse:
    """Load an adapter, while others' requests go on; from then on its name is a model's."""
    path = _allowed(body.lora_path, state)
    if body.lora_name in state.model_names or (body.lora_name in state.adapters and not body.load_inplace):
        # Clients of vLLM look for "already been loaded".
        remedy = "unload it, set load_inplace to replace an adapter, or give another name"
        raise InvalidRequestError(f"{body.lora_name!r} has already been loaded: {remedy}.", "lora_name")
    request = await asyncio.to_thread(_request, body.lora_name, str(path))
    await state.llm.add_lora(request)
    if body.load_inplace:  # a new id, so that what runs keeps what it began with
        state.adapters.pop(body.lora_name, None)
    if state.adapters.setdefault(body.lora_name, request) is not request:
        raise InvalidRequestError(f"the name {body.lora_name!r} was taken meanwhile; give another.", "lora_name")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", tags=["models"], response_class=PlainTextResponse)
async def unload_adapter(body: UnloadRequest, state: State) -> PlainTextResponse:
    """Let requests name an adapter no more; those that run with it go on."""
    _check_open(state)
    if state.adapters.pop(body.lora_name, None) is None:
        raise HTTPException(404, f"no adapter {body.lora_name!r} is loaded.")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _request(name: str, path: str) -> AdapterRequest:
    """An adapter of the kind that its folder says."""
    num_virtual, common = num_virtual_tokens(path, name), (name, next(_ids), path)
    return PromptAdapterRequest(*common, num_virtual) if num_virtual else LoRARequest(*common)


def _check_open(state: ServerState) -> Path:
    if state.args.allowed_adapter_dir is None:
        raise InvalidRequestError("adapters are loaded by a server only that was started with --allowed-adapter-dir.")
    return Path(state.args.allowed_adapter_dir).expanduser().resolve()


def _allowed(given: str, state: ServerState) -> Path:
    """A folder that clients may name, whatever links lead there, as may the files in it."""
    home = _check_open(state)
    try:
        path = (home / given).resolve()
        places = [path, (path / CONFIG).resolve(), (path / WEIGHTS).resolve()]
    except (OSError, ValueError, RuntimeError):
        places = [path := home.parent]
    if not all(place.is_relative_to(home) for place in places):
        raise InvalidRequestError("lora_path leads out of --allowed-adapter-dir; give a folder below it.", "lora_path")
    if not os.path.isdir(path):  # nor is a name that is too long
        raise HTTPException(404, f"there is no folder {Path(given).name[:80]!r} at lora_path.")
    return path
