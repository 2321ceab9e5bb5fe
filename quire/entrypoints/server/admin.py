"""What an operator changes while the server runs: limits (/admin/limits), engines, prefixes that stay in the KV cache.

Only a server with an API key lets itself be changed: a loopback address proves nothing, as proxies and a browser's
pages have it too. What may be changed is for the scheduler to say, and what may be pinned for the KV manager.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.chat_request import Messages
from quire.entrypoints.server.info_requests import EITHER, Engine, TokenId, is_chat
from quire.entrypoints.server.prompts import conversation_text
from quire.entrypoints.server.sse import while_connected
from quire.entrypoints.server.state import Changeable, State
from quire.errors import InvalidRequestError, RequestFailedError
from quire.protocol.cache import PinnedPrefix
from quire.protocol.stats import Limits

router = APIRouter(route_class=JsonRoute)


class LimitChanges(BaseModel, strict=True, extra="allow", allow_inf_nan=False):
    """Limits to change; what is left out stays as it is. Fields that are no limits are refused by name."""

    max_num_seqs: int | None = Field(None, ge=1, description="Most sequences that run at once.")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Most tokens of a step.")
    policy: str | None = Field(None, description="fcfs, priority, fair, shortest or deadline.")
    fair_input_weight: float | None = Field(None, ge=0)
    fair_output_weight: float | None = Field(None, gt=0)
    ageing_rate: float | None = Field(None, gt=0)
    ttft_target: float | None = Field(None, gt=0, description="Seconds; null for none, as the next.")
    tpot_target: float | None = Field(None, gt=0)


class LimitsAnswer(BaseModel, from_attributes=True):
    """The limits, the policy with its options, and what the limits can be raised to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    policy_options: dict[str, float | None]
    most_num_seqs: int
    most_num_batched_tokens: int


@router.get("/admin/limits", tags=["admin"], response_model=LimitsAnswer)
async def get_limits(state: State) -> Limits:
    """What the scheduler keeps to."""
    return state.llm.limits


@router.post("/admin/limits", tags=["admin"], response_model=LimitsAnswer)
async def set_limits(body: LimitChanges, state: Changeable) -> Limits:
    """Keep to other limits from the next step on; what runs goes on."""
    return await state.llm.set_limits(**body.model_dump(exclude_unset=True))


class EngineList(BaseModel):
    """All of them, by rank."""

    data: list[Engine]


@router.get("/admin/engines", tags=["admin"])
async def list_engines(state: State) -> EngineList:
    """The engines; more than one with --data-parallel-size."""
    if state.replicas is not None:
        return EngineList(data=state.replicas.states())
    return EngineList(data=[Engine(rank=0, state="up", num_requests=state.llm.num_unfinished, num_restarts=0)])


@router.post("/admin/engines/{rank}/restart", tags=["admin"], status_code=202)
async def restart_engine(rank: int, state: Changeable) -> EngineList:
    """Send an engine no more requests, and start it anew when it has finished those it has; the others go on."""
    if state.replicas is None:
        raise InvalidRequestError("there is one engine only; --data-parallel-size 2 would let one restart.", "rank")
    state.replicas.restart(rank)
    return await list_engines(state)


# Weights.


class Sleep(BaseModel):
    """Whether the engine takes no requests."""

    is_sleeping: bool


class WeightChange(BaseModel, extra="forbid"):
    """Other weights of the same model."""

    path: str = Field(min_length=1, description="A checkpoint's directory, on the server.")


_Mode = Literal["abort", "wait", "keep"]
_BUSY: dict[int | str, dict[str, Any]] = {409: {"description": "Requests are running."}}


@router.post("/sleep", tags=["admin"], responses=_BUSY)
async def sleep(request: Request, state: Changeable, level: int = 1, mode: _Mode | None = None) -> Sleep:
    """Give back the memory of weights and KV cache; requests are refused (503) until /wake_up. See `AsyncLLM.sleep`."""
    if not await while_connected(request.receive, state.llm.sleep(level, mode)):
        raise HTTPException(409, "requests are running, and the engine stays awake; try again when none is.")
    return Sleep(is_sleeping=True)


@router.post("/wake_up", tags=["admin"])
async def wake_up(state: Changeable, tags: Annotated[list[str] | None, Query()] = None) -> Sleep:
    """Load what the engine sleeps without: all, or "weights" first and then "kv_cache"."""
    await state.llm.wake_up(tags)
    return await is_sleeping(state)


@router.get("/is_sleeping", tags=["admin"])
async def is_sleeping(state: State) -> Sleep:
    """Whether requests are refused."""
    return Sleep(is_sleeping=await state.llm.is_sleeping())


@router.post("/pause", tags=["admin"])
async def pause(
    request: Request,
    state: Changeable,
    mode: _Mode = "abort",
    wait_for_inflight_requests: bool = False,
    clear_cache: bool = True,
) -> dict[str, str]:
    """Let requests that come wait until /resume; those that run are ended, waited for, or kept. As vLLM has it."""
    options = {"wait_for_inflight_requests": wait_for_inflight_requests, "clear_cache": clear_cache}
    await while_connected(request.receive, state.llm.pause_generation(mode=mode, **options))
    return {"status": "paused"}


@router.post("/resume", tags=["admin"])
async def resume(state: Changeable) -> dict[str, str]:
    """Let requests go on that wait since /pause."""
    await state.llm.resume_generation()
    return {"status": "resumed"}


@router.get("/is_paused", tags=["admin"])
async def is_paused(state: State) -> dict[str, bool]:
    """Whether requests wait for /resume."""
    return {"is_paused": await state.llm.is_paused()}


@router.post("/update_weights", tags=["admin"], responses=_BUSY)
async def update_weights(body: WeightChange, state: Changeable) -> Sleep:
    """Use the weights of another checkpoint of the same model; those in use stay where anything is wrong with them."""
    try:
        done = await state.llm.update_weights(body.path)
    except RequestFailedError as error:
        raise InvalidRequestError(str(error), "path") from None
    if not done:
        raise HTTPException(409, "requests are running, and the weights stay; try again when none is.")
    return await is_sleeping(state)


# Prefixes.


class PinRequest(BaseModel, extra="forbid", json_schema_extra=EITHER):
    """The beginning of prompts to come: `prompt`, text or token ids, or `messages`."""

    prompt: Annotated[str, Field(strict=True)] | Annotated[list[TokenId], Field(fail_fast=True)] = ""
    messages: Messages = []
    cache_salt: str | None = Field(None, min_length=1, description="For requests of the same salt only.")
    name: str | None = Field(None, min_length=1, max_length=200, description="To unpin it by; one is made up if unset.")


class Prefix(BaseModel, from_attributes=True):
    """A pinned prefix."""

    name: str
    num_tokens: int = Field(description="Whole KV blocks of the prompt.")
    num_blocks: int


class PrefixList(BaseModel):
    """All pinned prefixes, in the order in which they were pinned."""

    data: list[Prefix]


@router.get("/admin/prefixes", tags=["admin"])
async def list_prefixes(state: State) -> PrefixList:
    """What is pinned."""
    return PrefixList(data=[Prefix.model_validate(prefix) for prefix in await state.llm.pinned_prefixes()])


@router.post("/admin/prefixes", tags=["admin"], response_model=Prefix)
async def pin_prefix(body: PinRequest, state: Changeable) -> PinnedPrefix:
    """Compute a prompt, and keep its blocks whatever else comes. Of a conversation: up to its last message's end.

    As all that is computed, it waits while the engine is paused.
    """
    of_chat = is_chat(body)
    prompt: dict[str, Any] = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    given: str | list[int] = body.prompt
    if of_chat:
        given = await conversation_text(state, body.messages, chat_template=None, add_generation_prompt=False)
    prompt["prompt" if isinstance(given, str) else "prompt_token_ids"] = given
    return await state.llm.pin_prefix(prompt, body.name, add_special_tokens=not of_chat)  # type: ignore[arg-type]


@router.delete("/admin/prefixes/{name:path}", tags=["admin"])
async def unpin_prefix(name: str, state: Changeable) -> Response:
    """Let it be evicted like all others."""
    if not await state.llm.unpin_prefix(name):
        raise HTTPException(404, f"no prefix {name!r} is pinned.")
    return Response(status_code=200)


@router.post("/reset_prefix_cache", tags=["admin"], responses=_BUSY)
async def reset_prefix_cache(
    state: Changeable, reset_running_requests: bool = False, reset_external: bool = False
) -> Response:
    """Forget cached prefixes, and pins; 409 while requests are running, unless those are to be preempted.

    `reset_external`: those on the disk, too.
    """
    if not await state.llm.reset_prefix_cache(reset_running_requests, reset_external):
        raise HTTPException(409, "requests are running, and nothing was forgotten; try again when none is.")
    return Response(status_code=200)
