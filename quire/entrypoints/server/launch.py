"""From options to a running server: bind, load the model, listen, and leave in good order.

`quire serve` calls `serve`. The address is taken before the model is loaded, so that a port in use costs no time, and
listened on once the engine is ready. SIGTERM and Ctrl-C end it; so does the engine's death.
"""

import asyncio
import contextlib
import dataclasses
import errno
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

import quire
from quire.config.engine_args import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.engine.async_options import AsyncOptions
from quire.entrypoints.server.adapters import load_modules, read_modules
from quire.entrypoints.server.address import bound_socket, describe_address, raise_file_limit, ssl_context
from quire.entrypoints.server.app import build_app, imported
from quire.entrypoints.server.catalog import Catalog
from quire.entrypoints.server.connection import Connection
from quire.entrypoints.server.fleet import Fleet
from quire.entrypoints.server.log_line import ThroughputLine
from quire.entrypoints.server.metrics import ServingMetrics
from quire.entrypoints.server.options import ServerArgs
from quire.entrypoints.server.parsers.registry import THOUGHT_NAMES, TOOL_NAMES, check_name
from quire.entrypoints.server.parsing import warm_up
from quire.entrypoints.server.replicas import ReplicasClient
from quire.entrypoints.server.response_store import open_store
from quire.entrypoints.server.state import ServerState
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, QuireError
from quire.text.template import RESERVED_NAMES, ChatTemplate
from quire.utils.logs import configure_logging, logger

_BACKLOG = 2048  # connections that wait to be accepted
_ACCEPTED_AT_ONCE = 64
_LOG_SECONDS = 10.0
_FLUSH_SECONDS = 1.0  # for last words to reach the clients
_DEAD_SECONDS = 2.0  # for /health to tell that the engine is dead
_NEW_OBJECTS = 20_000  # among which cycles are looked for: a step of 256 streams makes thousands, and few cycles
_EXIT_SECONDS = 3.0  # for the interpreter to leave by itself, which threads can hold up
_STALL_SECONDS = 0.01  # between two looks at the event loop
_IDLE_SECONDS = 0.2  # likewise, where it has nothing to do but look
_KEY = '-H "Authorization: Bearer $QUIRE_API_KEY" '
_NEXT = """Try 'quire chat --url {url}/v1', a browser, or:
curl {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{{"prompt": "Once", "max_tokens": 32}}'"""
_STALL_WINDOW = 30.0


def serve(args: ServerArgs, engine_args: EngineArgs, catalog: Catalog | None = None) -> None:
    """Run a server until a signal comes; `catalog`: of several models, each loaded when it is asked for.

    Raises:
        ConfigError, NotYetSupportedError: the options.
        ModelLoadError: the model's files.
        QuireError: the address is taken.
        EngineDeadError: the engine died.
    """
    check_chat_options(args)
    for path in args.middleware or ():
        imported(path)  # before the model is
    open_store(args.response_store, args.response_store_max_bytes, args.response_store_seconds)  # likewise
    _configure_logging(args)
    raise_file_limit()
    for risk in args.risks():
        logger.warning(risk)
    with bound_socket(args) as listener:
        context = ssl_context(args)
        args = dataclasses.replace(args, chat_template=read_chat_template(args.chat_template))
        if catalog is None:
            state = load(args, engine_args)
        else:
            logger.info("Quire %s: %s", quire.__version__, catalog.describe())
            state = Fleet(catalog, args, _beside)
        try:
            server = Server(state, context)
            asyncio.run(server.serve(sockets=[listener]))
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            state.shutdown()
        leaving = threading.Timer(_EXIT_SECONDS, os._exit, (0 if server.death is None else 1,))
        leaving.daemon = True
        leaving.start()
    if server.death is not None:
        raise server.death
    logger.info("stopped")


def load(args: ServerArgs, engine_args: EngineArgs) -> ServerState:
    """The state of one model's server, its engine loaded. Raises as `serve`."""
    where = "in its own process" if args.engine == "process" else "in a thread"
    logger.info("Quire %s: loading %s, engine %s", quire.__version__, engine_args.model, where)
    options = AsyncOptions(args.engine, args.max_num_queued_reqs, args.log_level, args.step_timeout)
    names = args.served_model_name or [engine_args.model]
    adapters = read_modules(args, names)  # first, as a model may take minutes
    start = ReplicasClient if engine_args.data_parallel_size > 1 else None
    llm = AsyncLLM.from_engine_args(engine_args, options=options, start=start)
    for name, adapter in adapters.items():
        try:
            llm.find_adapter_now(adapter)
        except InvalidRequestError as error:
            llm.shutdown()
            raise ConfigError(f"the adapter {name!r} can't be used: {error}") from None
    replicas = llm.client if isinstance(llm.client, ReplicasClient) else None
    return ServerState(llm, args, names, replicas, adapters, ServingMetrics(llm.config.model.max_model_len))


def _beside(state: ServerState) -> list[Coroutine[Any, Any, None]]:
    """What runs beside a model."""
    name = "" if state.retain is None else f"{state.model_names[0]}: "
    return [watch_stalls(state), log_throughput(state, name), warm_up(state), load_modules(state)]


class Server(uvicorn.Server):
    """uvicorn's server, with signals, shutdown and start-up of our own.

    Attributes:
        death: why the engine died, if it did.
    """

    def __init__(self, state: ServerState | Fleet, context: ssl.SSLContext | None) -> None:
        args = state.args
        self._app = build_app(state)
        config = uvicorn.Config(
            self._app,
            http=partial(Connection, args),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_ACCEPTED_AT_ONCE,
            timeout_keep_alive=args.timeout_keep_alive,
            h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        )
        config.load()
        config.ssl = context
        super().__init__(config)
        self._state = state
        self._stopping, self._hurried = asyncio.Event(), asyncio.Event()
        self.death: EngineDeadError | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the event loop, whose handler is `stop`; and what it meets by itself to `LoopErrors`."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        yield

    def stop(self) -> None:
        """Stop accepting and let running requests finish in the time they have; called again, end them now."""
        if self._stopping.is_set():
            self._hurried.set()
            return
        self._stopping.set()
        self.should_exit = True
        count, seconds = self._state.num_unfinished, self._state.args.shutdown_timeout
        logger.info("stopping%s", f"; requests in flight: {count}, with {seconds:g} s to finish" if count else "")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # somebody else bound and listened while the model was loaded
            raise QuireError(f"can't listen: {error.strerror}. Stop what uses it, or choose another --port.") from None
        gc.collect()
        gc.freeze()  # what is here now stays: collections need not look at it again
        gc.set_threshold(_NEW_OBJECTS)
        others = _beside(self._state) if isinstance(self._state, ServerState) else []
        self._watchers = [asyncio.create_task(watcher) for watcher in (self._watch_engine(), *others)]
        assert sockets, "serve() passes the socket"
        sockets[0].listen(_BACKLOG)  # asyncio takes one number for two things
        address, args = describe_address(sockets[0], self._state.args), self._state.args
        logger.info("Quire is ready on %s", address)
        if not args.uds:
            logger.info(_NEXT.format(url=address.split()[0], key=_KEY if args.api_key else ""))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener, wait for requests, end what is left with an error, and close the connections."""
        for server in self.servers:
            server.close()
        connections: Any = self.server_state.connections
        for connection in list(connections):
            connection.shutdown()
        await self._wait(lambda: not self._state.num_unfinished, self._state.args.shutdown_timeout)
        if self._state.num_unfinished:
            logger.warning("requests ended unfinished: %d", self._state.num_unfinished)
        self._watchers[0].cancel()
        self._state.end_requests()
        self._hurried.clear()
        await self._wait(lambda: not connections, _FLUSH_SECONDS)
        for connection in list(connections):  # of readers that are too slow
            connection.transport.abort()
        await self._wait(lambda: not self.server_state.tasks, _FLUSH_SECONDS)

    async def _watch_engine(self) -> None:
        """End the server some time after the engine's death."""
        self.death = await self._state.wait_dead()
        if not self._stopping.is_set():
            await asyncio.sleep(_DEAD_SECONDS)
        self._stopping.set()
        self.should_exit = True

    async def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end and not self._hurried.is_set():
            await asyncio.sleep(0.02)


class LoopErrors:
    """The event loop's exception handler: a line now and again when files run out, where asyncio floods the log."""

    def __init__(self) -> None:
        self._next_line = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LOG_SECONDS
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            logger.error("a connection has to wait: no more files can be opened; raise their limit, now %d", limit)


async def watch_stalls(state: ServerState) -> None:
    """Keep the longest time for which the event loop was held up, within the last half minute or minute."""
    before = 0.0
    while True:
        longest, end = 0.0, time.monotonic() + _STALL_WINDOW
        while (start := time.monotonic()) < end:
            seconds = _STALL_SECONDS if state.num_in_flight else _IDLE_SECONDS
            await asyncio.sleep(seconds)
            longest = max(longest, time.monotonic() - start - seconds)
            state.metrics.event_loop_max_stall = max(before, longest)
        before = longest


async def log_throughput(state: ServerState, name: str = "") -> None:
    """Say every few seconds how fast a busy server is, unless it is not to."""
    log = ThroughputLine(state.metrics, time.monotonic())
    while not state.llm.config.args.disable_log_stats:
        await asyncio.sleep(_LOG_SECONDS)
        if (line := log.next(state.llm.stats(), time.monotonic())) is not None:
            logger.info("%s%s", name, line)


def check_chat_options(args: ServerArgs) -> None:
    """Check what the options say of chats, before a model is loaded. Raises ConfigError."""
    check_name("tool_call_parser", args.tool_call_parser, TOOL_NAMES)
    if args.reasoning_parser is not None:
        check_name("reasoning_parser", args.reasoning_parser, THOUGHT_NAMES)
    if reserved := RESERVED_NAMES & (args.default_chat_template_kwargs or {}).keys():
        raise ConfigError(f"default_chat_template_kwargs can't set {min(reserved)!r}; each request says it itself.")


def read_chat_template(template: str | None) -> str | None:
    """The text of a template given as text or as a file.

    Raises:
        ConfigError: it is no file, and no Jinja either.
    """
    if template is None:
        return None
    try:
        is_text = any(mark in template for mark in ("{{", "{%", "\n"))
        if not is_text and Path(template).is_char_device():
            raise OSError(0, "a device has no end")
        text = template if is_text else Path(template).read_text(encoding="utf-8-sig")
        ChatTemplate(text, {}).check()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"chat_template {template!r} can't be read ({reason}); give a file, or Jinja text.") from None
    except InvalidRequestError as error:
        raise ConfigError(str(error)) from None
    return text


# The process.


def _configure_logging(args: ServerArgs) -> None:
    configure_logging(args.log_level)
    warnings.filterwarnings("ignore", "temperature .* is raised")  # each value once, that clients send
    web = logging.getLogger("uvicorn")
    web.handlers, web.propagate = logging.getLogger("quire").handlers, False
    # Its warnings are about what clients send: any client could fill the log.
    web.setLevel((args.uvicorn_log_level or ("warning" if args.log_level == "debug" else "error")).upper())
