"""What the routes share: the engine, the options, the names the model goes by, and counts of what goes on.

`launch` makes one, `build_app` hangs it on the app, and a route takes it with `get_state(request)`. Where a `Fleet`
hangs there, each loaded model has one.
"""

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.server.errors import ModelNotFoundError
from quire.entrypoints.server.info_requests import ModelCard
from quire.entrypoints.server.metrics import ServingMetrics
from quire.entrypoints.server.options import ServerArgs
from quire.entrypoints.server.parsers.forms import Form
from quire.entrypoints.server.prometheus import Figures
from quire.entrypoints.server.replicas import ReplicasClient
from quire.entrypoints.server.unknown_fields import UnknownFieldLog, answer_vllms
from quire.errors import EngineDeadError
from quire.lora.request import AdapterRequest
from quire.protocol.stats import EngineStats

MODEL = "quire.model"  # in a request's scope: the state of the model that it asks for, where there are several


@dataclass
class ServerState:
    """The state of a running server."""

    llm: AsyncLLM
    args: ServerArgs
    model_names: list[str]  # the first one is shown in answers
    replicas: ReplicasClient | None = None  # where there are several engines
    adapters: dict[str, AdapterRequest] = field(default_factory=dict)  # further names, each of one
    metrics: ServingMetrics = field(default_factory=ServingMetrics)  # of the requests; may be older than the engine
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    num_in_flight: int = 0  # HTTP requests for work that came and are not answered in full
    learned_forms: dict[str, Form | None] = field(default_factory=dict)  # chat template -> its calls, where no file is
    unknown_fields: UnknownFieldLog = field(default_factory=UnknownFieldLog)
    live_feed: Any = None  # the page's, once somebody looks
    retain: Callable[[], Callable[[Any], None]] | None = None  # keep the model for more than the request, until called

    def __post_init__(self) -> None:
        self.llm.observer = self.metrics

    @property
    def names(self) -> list[str]:
        """All that requests may give for the model: its own, and those of its adapters."""
        return [*self.model_names, *self.adapters]

    @property
    def num_unfinished(self) -> int:
        """Requests and background jobs that have not ended."""
        return self.num_in_flight

    def engine_stats(self) -> list[EngineStats]:
        """The figures of each engine, by rank."""
        return [self.llm.stats()] if self.replicas is None else self.replicas.stats

    def loaded(self, name: str) -> "ServerState | None":
        """The state of a model, if it is loaded."""
        return self

    def figures(self) -> list[Figures]:
        """What /metrics shows."""
        llm = self.llm
        return [Figures(self.metrics, self.engine_stats(), self.model_names[0], llm.config, llm.num_blocks)]

    def card(self, name: str) -> ModelCard:
        """What /v1/models shows of a name."""
        length, base, adapter = self.llm.config.model.max_model_len, self.model_names[0], self.adapters.get(name)
        root, parent = (self.llm.config.args.model, None) if adapter is None else (astuple(adapter)[2], base)
        return ModelCard(id=name, created=self.created, root=root, parent=parent, max_model_len=length)

    async def check_health(self) -> None:
        """EngineDeadError when the server can't answer any more."""
        await self.llm.check_health()

    async def wait_dead(self) -> EngineDeadError:
        """Wait for the end of what serves, and return its reason."""
        return await self.llm.wait_dead()

    def end_requests(self) -> None:
        """End what is running, and who looks on; take nothing more."""
        self.llm.end_requests()
        if self.live_feed is not None:
            self.live_feed.close()

    def shutdown(self) -> None:
        """End the engine, which may take a few seconds."""
        self.llm.shutdown()

    def admit(self, body: Any) -> str:
        """Note what of a body nobody knows; the name to answer with. Raises as `answer_vllms` and `check_model` do."""
        answer_vllms(body)
        self.unknown_fields.note(body)
        return self.check_model(body.model)

    def check_model(self, name: str | None) -> str:
        """The name to answer with: the one asked for, or the first where none is.

        Raises:
            ModelNotFoundError: this server has no such model.
        """
        if name and name not in self.model_names and name not in self.adapters:
            raise ModelNotFoundError(name, self.names)
        return name or self.model_names[0]


def get_state(request: Request) -> ServerState:
    """The state of the server that got this request; of the model that it asks for, where there are several."""
    return request.scope.get(MODEL) or request.app.state.quire


def _changeable(request: Request, state: Annotated[ServerState, Depends(get_state)]) -> ServerState:
    if not state.args.api_key:
        raise HTTPException(403, "a server can be changed where it has an API key only; start it with --api-key.")
    # A browser that keeps the key as a password sends it along with any page's form, unlike all other headers.
    given, origin = request.headers, request.headers.get("origin", "")
    is_foreign = origin and origin.partition("://")[2] != given.get("host") and origin not in state.args.allowed_origins
    if is_foreign and given.get("authorization", "").lower().startswith("basic"):
        raise HTTPException(403, "another page's request can't use a password; send 'Authorization: Bearer KEY'.")
    return state


State = Annotated[ServerState, Depends(get_state)]
Changeable = Annotated[ServerState, Depends(_changeable)]  # of a server that lets itself be changed
