"""Several models behind one server, each in an engine process of its own that is started when it is asked for.

`launch` hangs a `Fleet` on the app in the place of a `ServerState`. A route that needs a model enters with its name,
waits while it is loaded, and finds the model's own state (`JsonRoute` does); `Leases` tells when the answer is sent.
Who is loaded, and who makes room, `LoadPolicy` says.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.engine_args import EngineArgs, EngineConfig
from quire.engine.async_llm import AsyncLLM, AsyncOptions
from quire.engine.clients.process import ProcessClient
from quire.entrypoints.server.catalog import Catalog, Listed
from quire.entrypoints.server.errors import ModelNotFoundError
from quire.entrypoints.server.info_requests import ManagedModelCard
from quire.entrypoints.server.loading import LoadPolicy, Orders, Ticket
from quire.entrypoints.server.metrics import ServingMetrics
from quire.entrypoints.server.options import ServerArgs
from quire.entrypoints.server.prometheus import Figures
from quire.entrypoints.server.room import read_room
from quire.entrypoints.server.sse import while_connected
from quire.entrypoints.server.state import MODEL, ServerState
from quire.errors import EngineDeadError, EngineStoppedError, OverloadedError, QuireError, RequestFailedError
from quire.protocol.stats import EngineStats
from quire.utils.logs import logger

_TICKETS = "quire.tickets"  # in a request's scope
_TICK_SECONDS = 0.25
_IDLE = EngineStats()
_Tend = Callable[[ServerState], Iterable[Coroutine[Any, Any, Any]]]


class _Model:
    """One of the models, loaded or not."""

    def __init__(self, listed: Listed) -> None:
        self.listed, self.error = listed, listed.error
        self.client: ProcessClient | None = None  # from the moment that its process is started
        self.llm: AsyncLLM | None = None  # likewise, from the moment that it is ready
        self.state: ServerState | None = None  # while it serves
        self.tasks: list[asyncio.Task[Any]] = []
        self.metrics: ServingMetrics | None = None  # once it was loaded; they go on when it is loaded again


class Fleet:
    """The models of a server. All but `shutdown` is called on the event loop.

    Attributes:
        args, model_names, created, num_in_flight: as of a `ServerState`.
    """

    def __init__(self, catalog: Catalog, args: ServerArgs, tend: _Tend) -> None:
        """`tend`: what runs beside each loaded model."""
        self.args, self.created, self.num_in_flight = args, int(time.time()), 0
        self.model_names = self.names = [listed.name for listed in catalog.models]
        self._models = {listed.name: _Model(listed) for listed in catalog.models}
        sizes = {listed.name: sum(listed.room) for listed in catalog.models}
        self._policy, self._tend = LoadPolicy(sizes, catalog.limits), tend
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # that load and unload
        self._threads = ThreadPoolExecutor(len(self._models), "quire-model")
        self._ended, self._turn = threading.Event(), threading.Lock()

    @property
    def num_unfinished(self) -> int:
        """Requests and background jobs that have not ended."""
        return self.num_in_flight + sum(model.state.num_in_flight for model in self._models.values() if model.state)

    # Requests.

    def check_model(self, name: str | None) -> str:
        """The model of this name, or the first one; raises ModelNotFoundError."""
        if name and name not in self._models:
            raise ModelNotFoundError(name, self.model_names)
        return name or self.model_names[0]

    async def enter(self, request: Request, name: object) -> bool:
        """Give a request the state of the model that it names, loading it first; False: its client has left meanwhile.

        Raises:
            ModelNotFoundError: there is no such model.
            OverloadedError: it can't be loaded now, as others are at work.
            RequestFailedError, EngineDeadError: it does not load, or has just died.
        """
        if name is not None and not isinstance(name, str):
            return True  # the route is about to refuse it
        name, limit = self.check_model(name), self.args.max_num_queued_reqs
        if limit is not None and len(self._policy.waiting) >= limit:
            raise OverloadedError(f"{limit} requests wait for models already; try again later.")
        if self._policy.models[name].state == "unloaded" and not any(
            ticket.model == name for ticket in self._policy.waiting
        ):
            await self._look_at(name)
            self._check_going_on()
        ticket, orders = self._policy.ask(name, time.monotonic())
        request.scope[_TICKETS].append(ticket)
        self._carry_out(orders)
        if ticket.verdict == "waiting" and await while_connected(request.receive, self._wait(ticket)) is None:
            return False
        self._check_going_on()
        model = self._models[name]
        if ticket.verdict == "refused":
            seconds, most = self._policy.limits.max_wait, self._policy.limits.max_loaded
            reason = f"for {seconds:g} s others have been at work, and at most {most} are loaded at once"
            raise OverloadedError(f"the model {name!r} can't be loaded now: {reason}; try again later.", 5)
        if ticket.verdict == "failed":
            raise RequestFailedError(f"the model {name!r} can't be loaded: {model.error}")
        if model.state is None:
            raise EngineDeadError(f"the engine of {name!r} has died; the next request starts it again.")
        request.scope[MODEL] = model.state
        return True

    def leave(self, tickets: Iterable[Ticket]) -> None:
        """A request's answer is sent, or the request given up."""
        for ticket in tickets:
            self._carry_out(self._policy.leave(ticket, time.monotonic()))

    async def _wait(self, ticket: Ticket) -> bool:
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            await future
        finally:
            del self._waiting[ticket]
        return True

    def _retain(self, name: str) -> Callable[[Any], None]:
        """Keep a model that a request has until the result is called."""
        ticket = self._policy.share(name)
        return lambda _: self.leave([ticket])

    def _check_going_on(self) -> None:
        if self._ended.is_set():
            raise EngineStoppedError("the server is shutting down.")

    # Loading.

    async def _look_at(self, name: str) -> None:
        """Before others make room for a model: whether it can be read at all, and how much it takes."""
        loop, model, free = asyncio.get_running_loop(), self._models[name], self._policy.limits.memory
        try:
            _, room = await loop.run_in_executor(self._threads, read_room, model.listed.args, free)
        except (QuireError, OSError) as error:
            model.error = str(error)
            logger.error("%s can't be loaded: %s", name, error)
            raise RequestFailedError(f"the model {name!r} can't be loaded: {error}") from None
        self._policy.models[name].size = sum(room)

    def _carry_out(self, orders: Orders) -> None:
        for work, names in ((self._load, orders.load), (self._unload, orders.unload)):
            for name in names if not self._ended.is_set() else ():
                task = asyncio.get_running_loop().create_task(work(name))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for ticket in orders.decided:
            if (future := self._waiting.get(ticket)) is not None and not future.done():
                future.set_result(None)

    async def _load(self, name: str) -> None:
        model, start = self._models[name], time.monotonic()
        logger.info("loading %s", name)
        try:
            llm = await asyncio.get_running_loop().run_in_executor(self._threads, self._start, model)
        except Exception as error:
            if self._ended.is_set():
                return
            if not isinstance(error, QuireError):
                logger.exception("loading %s failed", name)
            model.error = str(error) if isinstance(error, QuireError) else "internal error; the server's log has it."
            logger.error("%s can't be loaded: %s", name, model.error)
            self._carry_out(self._policy.failed(name, time.monotonic()))
            return
        model.error = None
        metrics = model.metrics = model.metrics or ServingMetrics(llm.config.model.max_model_len)
        retain = partial(self._retain, name)
        model.state = ServerState(llm, self.args, [name], metrics=metrics, created=self.created, retain=retain)
        begin = asyncio.get_running_loop().create_task
        model.tasks = [begin(work) for work in (self._mourn(name, llm), *self._tend(model.state))]
        logger.info("%s is ready after %.1f s", name, time.monotonic() - start)
        self._carry_out(self._policy.loaded(name, time.monotonic()))

    def _start(self, model: _Model) -> AsyncLLM:
        """In a thread: start a model's engine, and wait for it."""

        def start(args: EngineArgs, config: EngineConfig, options: AsyncOptions) -> ProcessClient:
            with self._turn:  # whoever ends everything sees each process that there is
                self._check_going_on()
                model.client = ProcessClient(args, options.log_level)
            return model.client

        options = AsyncOptions("process", self.args.max_num_queued_reqs, self.args.log_level, self.args.step_timeout)
        model.llm = llm = AsyncLLM.from_engine_args(model.listed.args, options=options, start=start)
        return llm

    async def _mourn(self, name: str, llm: AsyncLLM) -> None:
        """When a model's engine dies, make the next request start it again."""
        await llm.wait_dead()
        if self._policy.models[name].state != "ready":
            return  # it is being unloaded
        orders = self._policy.died(name, time.monotonic())
        orders.unload.append(name)
        self._carry_out(orders)

    async def _unload(self, name: str) -> None:
        model, llm = self._models[name], self._models[name].llm
        state, model.state = model.state, None
        assert llm is not None, "only a model that serves is unloaded"
        assert state is not None
        if not llm.errored:
            logger.info("unloading %s", name)
        for task in model.tasks:
            task.cancel()
        llm.end_requests()
        if state.live_feed is not None:
            state.live_feed.close(f"{name} is not loaded any more; a request to it loads it.")
        await asyncio.get_running_loop().run_in_executor(self._threads, llm.shutdown)
        state.metrics.on_engine_stats(_IDLE, time.monotonic())
        model.llm = model.client = None
        self._carry_out(self._policy.unloaded(name, time.monotonic()))

    # The server.

    def loaded(self, name: str) -> ServerState | None:
        """The state of a model, if it is loaded."""
        return self._models[name].state

    def figures(self) -> list[Figures]:
        """What /metrics shows: the models that were loaded at some time."""
        return [
            model.state.figures()[0] if model.state else Figures(model.metrics, [_IDLE], name)
            for name, model in self._models.items()
            if model.metrics is not None
        ]

    def card(self, name: str) -> ManagedModelCard:
        """What /v1/models shows of a model."""
        model, listed = self._models[name], self._models[name].listed
        num_waiting = sum(ticket.model == name for ticket in self._policy.waiting)
        return ManagedModelCard(
            id=name,
            created=self.created,
            root=listed.args.model,
            max_model_len=listed.max_model_len if model.llm is None else model.llm.config.model.max_model_len,
            state=self._policy.models[name].state,
            size=listed.num_bytes,
            memory=0 if model.client is None else _resident_bytes(model.client.pid),
            num_requests=len(self._policy.models[name].users) + num_waiting,
            error=model.error,
        )

    async def check_health(self) -> None:
        """A server whose engines come and go is well as long as it answers."""

    async def wait_dead(self) -> EngineDeadError:
        """Watch the time; there is no end but the server's."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._carry_out(self._policy.advance(time.monotonic()))

    def end_requests(self) -> None:
        """End what runs and what waits, and take nothing more."""
        self._end_loading()
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)
        for model in self._models.values():
            if model.state is not None:
                model.state.end_requests()

    def shutdown(self) -> None:
        """End all engines, which may take a few seconds; the event loop is over."""
        self._end_loading()
        self._threads.shutdown()
        with ThreadPoolExecutor(len(self._models)) as threads:
            list(threads.map(lambda llm: llm.shutdown(), [m.llm for m in self._models.values() if m.llm is not None]))

    def _end_loading(self) -> None:
        with self._turn:
            self._ended.set()
        for model in self._models.values():
            if model.client is not None and model.llm is None:
                model.client.kill()


class Leases:
    """Middleware: whatever models a request has entered, it leaves when its answer is sent."""

    def __init__(self, app: ASGIApp, fleet: Fleet) -> None:
        self._app, self._fleet = app, fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_TICKETS] = tickets = []
        try:
            await self._app(scope, receive, send)
        finally:
            self._fleet.leave(tickets)


def _resident_bytes(pid: int) -> int:
    """Of a process and its descendants; 0 where the system does not tell."""
    total = 0
    with suppress(OSError, ValueError, IndexError):
        process = Path(f"/proc/{pid}")
        total = int((process / "statm").read_text().split()[1]) * 4096
        for task in (process / "task").iterdir():
            total += sum(_resident_bytes(int(child)) for child in (task / "children").read_text().split())
    return total
