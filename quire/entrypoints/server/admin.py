"""/admin/limits: what the scheduler keeps to, and how to change it while the server runs; /admin/engines: who computes.

Only a server with an API key lets itself be changed: a loopback address proves nothing, as proxies and a browser's
pages have it too. What may be changed is for the scheduler to say.
"""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from quire.entrypoints.server.body import JsonRoute
from quire.entrypoints.server.replicas import ReplicaState
from quire.entrypoints.server.state import Changeable, State
from quire.errors import InvalidRequestError
from quire.protocol.stats import Limits

router = APIRouter(route_class=JsonRoute)


class LimitChanges(BaseModel):
    """Limits to change; what is left out stays as it is. Fields that are no limits are refused by name."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    max_num_seqs: int | None = Field(None, ge=1, description="Most sequences that run at once.")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Most tokens of a step.")
    policy: str | None = Field(None, description="fcfs, priority, fair, shortest or deadline.")
    fair_input_weight: float | None = Field(None, ge=0)
    fair_output_weight: float | None = Field(None, gt=0)
    ageing_rate: float | None = Field(None, gt=0)
    ttft_target: float | None = Field(None, gt=0, description="Seconds; null for none, as the next.")
    tpot_target: float | None = Field(None, gt=0)


class LimitsAnswer(BaseModel):
    """The limits, the policy with its options, and what the limits can be raised to."""

    model_config = ConfigDict(from_attributes=True)

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
    given: dict[str, Any] = body.model_dump(exclude_unset=True)
    return await state.llm.set_limits(**given)


class Engine(BaseModel):
    """One of the engines behind the server."""

    model_config = ConfigDict(from_attributes=True)

    rank: int = Field(description="Its label in /metrics.")
    state: Literal["up", "draining", "starting"] = Field(description="Draining: it finishes what it has, and restarts.")
    num_requests: int
    num_restarts: int


class EngineList(BaseModel):
    """All of them, by rank."""

    data: list[Engine]


@router.get("/admin/engines", tags=["admin"])
async def list_engines(state: State) -> EngineList:
    """The engines; more than one with --data-parallel-size."""
    one = [ReplicaState(0, "up", state.llm.num_unfinished, 0)]
    states = one if state.replicas is None else state.replicas.states()
    return EngineList(data=[Engine.model_validate(each) for each in states])


@router.post("/admin/engines/{rank}/restart", tags=["admin"], status_code=202)
async def restart_engine(rank: int, state: Changeable) -> EngineList:
    """Send an engine no more requests, and start it anew when it has finished those it has; the others go on."""
    if state.replicas is None:
        raise InvalidRequestError("there is one engine only; --data-parallel-size 2 would let one restart.", "rank")
    state.replicas.restart(rank)
    return await list_engines(state)
