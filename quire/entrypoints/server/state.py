"""What the routes share: the engine, the options, the names the model goes by, and counts of what goes on.

`launch` makes one, `build_app` hangs it on the app, and a route takes it with `get_state(request)`.
"""

import time
from dataclasses import dataclass, field

from fastapi import Request

from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.server.errors import ModelNotFoundError
from quire.entrypoints.server.options import ServerArgs
from quire.entrypoints.server.parsers.forms import Form
from quire.entrypoints.server.replicas import ReplicasClient
from quire.entrypoints.server.unknown_fields import UnknownFieldLog
from quire.protocol.stats import EngineStats


@dataclass
class ServerState:
    """The state of a running server."""

    llm: AsyncLLM
    args: ServerArgs
    model_names: list[str]  # the first one is shown in answers
    replicas: ReplicasClient | None = None  # where there are several engines
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    num_in_flight: int = 0  # HTTP requests for work that came and are not answered in full
    learned_forms: dict[str, Form | None] = field(default_factory=dict)  # chat template -> its calls, where no file is
    unknown_fields: UnknownFieldLog = field(default_factory=UnknownFieldLog)

    def engine_stats(self) -> list[EngineStats]:
        """The figures of each engine, by rank."""
        return [self.llm.stats()] if self.replicas is None else self.replicas.stats

    def check_model(self, name: str | None) -> str:
        """The name to answer with: the one asked for, or the first where none is.

        Raises:
            ModelNotFoundError: this server has no such model.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ModelNotFoundError(name, self.model_names)
        return name


def get_state(request: Request) -> ServerState:
    """The state of the server that got this request."""
    return request.app.state.quire
