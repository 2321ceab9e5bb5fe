"""Several engines behind one client: each request goes to the one that the router names, each call to all of them.

`launch` gives it to `AsyncLLM` where data_parallel_size > 1. An engine that dies or hangs is started again; what it had
not begun goes to another, and the rest ends with the reason. One can be drained and started anew while the others
serve. It knows engines by their `ProcessClient`s, and nothing of what is inside, such as ranks of a tensor group.
"""

import asyncio
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import msgspec

from quire.config.engine_args import EngineArgs, EngineConfig
from quire.config.scheduler import OPTIONS_OF, POLICY_OPTIONS
from quire.engine.async_options import AsyncOptions
from quire.engine.clients.process import ProcessClient
from quire.engine.monitor import Monitor
from quire.entrypoints.server.info_requests import Engine
from quire.entrypoints.server.router import Router, RouterOptions
from quire.entrypoints.server.totals import total_reply, total_stats
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, RequestFailedError
from quire.kvcache.prefix import BlockHasher, root_hash
from quire.protocol.core import Abort, Add, Call, Command, Dead, Event, Fault, Finish, News, Ready, Refused, Reply
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.stats import EngineStats
from quire.protocol.step import SequenceOutput
from quire.sampling_params import SamplingParams
from quire.scheduler.live_limits import limits_of
from quire.utils.logs import logger

_STEADY_SECONDS = 60.0  # an engine that lived so long is started again at once
_LONGEST_WAIT = 30.0  # seconds before an engine that keeps dying is tried again
_MOST_HASHED = 512  # blocks of a prompt that are looked at: what is beyond makes no difference
_TOTALS_SECONDS = 0.1  # for which sums are good
_NO_ANSWER = -1  # id of calls that are nobody's
_TO_BE_ALIKE = -2  # likewise, of those without which an engine would answer otherwise than the others
_OF_IDLE = ("reset_prefix_cache", "sleep", "update_weights")  # calls that do nothing while requests run


class _Route:
    """Where a request went."""

    __slots__ = ("aborted", "left", "moved", "rank", "request", "request_id")

    def __init__(self, request: NewRequest) -> None:
        self.request_id = request.request_id
        self.request: NewRequest | None = request  # until something of it has come
        self.rank: int | None = None  # None: it waits for an engine
        self.left = set(range(request.task.num_sequences))  # sequences that go on
        self.moved = self.aborted = False


class _Replica:
    """One of the engines."""

    def __init__(self, rank: int, client: ProcessClient) -> None:
        self.rank, self.client = rank, client
        self.state: Literal["up", "draining", "starting"] = "starting"
        self.monitor: Monitor | None = None
        self.starter: threading.Thread | None = None
        self.born, self.wait = time.monotonic(), 0.0
        self.num_restarts = 0
        self.pinning: dict[str, Call] = {}  # prompts that it computes to pin them then

    @property
    def serves(self) -> bool:
        return self.state != "starting"


class ReplicasClient:
    """Starts the engines (a `CoreClient`).

    Attributes:
        stats: of each engine, by rank.
    """

    def __init__(self, args: EngineArgs, config: EngineConfig, options: AsyncOptions) -> None:
        """`config` is what the arguments came to.

        Raises:
            ConfigError: the engines are to be threads.
        """
        if options.engine == "thread":
            raise ConfigError(f"data_parallel_size={args.data_parallel_size} needs engine='process', not a thread.")
        if args.data_parallel_size > (cores := os.cpu_count() or 1):
            logger.warning("data_parallel_size=%d is more than there are cores, %d", args.data_parallel_size, cores)
        self._args, self._options = args, options
        self.stats = [EngineStats(limits=limits_of(config.scheduler, config.scheduler))] * args.data_parallel_size
        self._totals, self._totals_due = self.stats[0], 0.0
        self._replicas: list[_Replica] = []
        self._routes: dict[str, _Route] = {}  # by request, in order of arrival
        self._calls: dict[int, tuple[Call, set[int], dict[int, Reply]]] = {}  # who has yet to answer, and who has
        self._limits: dict[str, Any] = {}  # that were changed
        self._held: list[Call] = []  # while requests are kept as they are, what says so
        self._weights: list[Call] = []  # that put engines to sleep, or gave them others
        self._pins: dict[str, list[Any]] = {}  # name -> arguments
        self._turn, self._closed = threading.Lock(), threading.Event()
        try:
            for rank in range(args.data_parallel_size):
                self._replicas.append(_Replica(rank, self._make(rank)))
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> Ready:
        ready = [replica.client.wait_ready() for replica in self._replicas]
        longest = min(one.max_model_len for one in ready)
        # One that starts again must hold what was promised.
        self._args = dataclasses.replace(self._args, max_model_len=longest)
        self._router = Router(RouterOptions(self._args.data_parallel_router), [one.num_blocks for one in ready])
        self._hasher = BlockHasher(ready[0].block_size)
        return Ready(longest, sum(one.num_blocks for one in ready), ready[0].block_size)

    def attach(self, on_event: Callable[[Event], None]) -> None:
        self._loop, self._on_event = asyncio.get_running_loop(), on_event
        for replica in self._replicas:
            if replica.starter is None:
                self._join(replica)
            elif not replica.starter.is_alive():  # it has come back while no loop ran
                self._return(replica)

    def send(self, command: Command) -> None:
        match command:
            case Add(request):
                route = self._routes[request.request_id] = _Route(request)
                self._place(route)
            case Abort(request_ids):
                for route in [self._routes[own] for own in request_ids if own in self._routes]:
                    route.aborted = True
                    self._tell(route, Abort([route.request_id]))
            case Finish(sequences):
                for request_id, index in sequences:
                    if (route := self._routes.get(request_id)) is not None:
                        self._tell(route, Finish([(request_id, index)]))
                        self._end(route, index)
            case Call():
                self._call(command)

    def seconds_stuck(self) -> float:
        return 0.0  # each engine has a monitor of its own

    def states(self) -> list[Engine]:
        """Of each engine, by rank."""
        num, ours = self._router.loads, self._replicas
        return [Engine(rank=r.rank, state=r.state, num_requests=num[r.rank], num_restarts=r.num_restarts) for r in ours]

    def restart(self, rank: int) -> None:
        """Send an engine nothing more, and start it anew once it has finished what it has; returns at once.

        Raises:
            InvalidRequestError: there is no such engine, or it is not up, or no other one is.
        """
        up = [replica.rank for replica in self._replicas if replica.state == "up"]
        if rank not in up or len(up) == 1:
            raise InvalidRequestError(f"engine {rank} can't restart: it and another must be up; {up} are.", "rank")
        logger.info("engine %d finishes its requests (%d), and starts anew then", rank, self._router.loads[rank])
        self._drain(self._replicas[rank])

    def close(self) -> None:
        self._closed.set()
        with self._turn:  # nobody is started from here on
            for replica in self._replicas:
                if replica.starter is not None:
                    replica.client.kill()
        for replica in self._replicas:
            if replica.starter is not None:
                replica.starter.join()
            if replica.monitor is not None:
                replica.monitor.close()
        with ThreadPoolExecutor(len(self._replicas) or 1) as threads, contextlib.suppress(RuntimeError):
            list(threads.map(lambda replica: replica.client.close(), self._replicas))
        for replica in self._replicas:  # no new threads are to be had at the interpreter's end
            replica.client.close()

    def _make(self, rank: int) -> ProcessClient:
        return ProcessClient(self._args, self._options.log_level, rank)

    # Requests.

    def _tell(self, route: _Route, command: Command) -> None:
        """What concerns a request, where it is; one that waits for an engine is told when it is sent on, or aborted."""
        if route.rank is not None:
            self._replicas[route.rank].client.send(command)
        elif isinstance(command, Abort):  # no engine will say so, nor has begun it
            self._drop(route)
            ended = [SequenceOutput(route.request_id, i, [], finish_reason="abort") for i in sorted(route.left)]
            self._on_event(News(ended, [], now := time.monotonic(), now, self._totals))

    def _place(self, route: _Route) -> None:
        """Send a request on, or leave it until there is an engine that takes it."""
        assert route.request is not None, "what has begun stays where it is"
        route.rank = self._router.choose(self._names(route.request))
        self._tell(route, Add(route.request))
        if route.aborted:
            self._tell(route, Abort([route.request_id]))

    def _names(self, request: NewRequest) -> list[bytes]:
        """Of the blocks of a prompt's beginning."""
        if not (self._router.uses_names and self._args.enable_prefix_caching):
            return []
        root = root_hash(request.cache_salt, b"" if request.adapter is None else request.adapter.digest)
        return self._hasher.names(root, request.prompt_token_ids[: _MOST_HASHED * self._hasher.block_size])

    def _end(self, route: _Route, index: int) -> None:
        """A sequence has ended, and perhaps its request."""
        route.left.discard(index)
        if not route.left:
            self._drop(route)

    def _drop(self, route: _Route) -> None:
        del self._routes[route.request_id]
        if route.rank is not None:
            self._router.finish(route.rank)
            self._renew_if_drained(self._replicas[route.rank])

    # What engines say.

    def _join(self, replica: _Replica) -> None:
        """From now on an engine serves."""
        replica.state = "up"
        take, lose = partial(self._take, replica, replica.client), partial(self._lose, replica)
        replica.monitor = Monitor(replica.client, self._options.step_timeout, take, lose, f"engine {replica.rank}")
        replica.monitor.attach()

    def _take(self, replica: _Replica, client: ProcessClient, event: Event) -> None:
        if replica.client is not client or not replica.serves:
            return  # last words of one that is over
        if event.__class__ is News:
            for item in event.outputs:  # type: ignore[union-attr]
                if (route := self._routes.get(item.request_id)) is None:
                    if item.finish_reason is not None and item.request_id in replica.pinning:
                        client.send(replica.pinning.pop(item.request_id))
                    continue
                if item.new_token_ids:
                    route.request = None
                if item.finish_reason is not None:
                    self._end(route, item.sequence_index)
            event = self._with_totals(replica.rank, event)  # type: ignore[arg-type]
        elif isinstance(event, Reply):
            return self._collect(replica.rank, event)
        elif isinstance(event, Dead) and replica.monitor is not None:
            return replica.monitor.die(event.message)
        elif isinstance(event, Refused):
            if (call := replica.pinning.pop(event.request_id, None)) is not None:
                self._collect(replica.rank, Reply(call.call_id, fault=event.fault))
            elif (route := self._routes.get(event.request_id)) is not None:
                self._drop(route)
        self._on_event(event)

    def _with_totals(self, rank: int, news: News) -> News:
        """News of an engine with the stats of all, which are summed up now and again, and when it has no more to do."""
        self.stats[rank] = stats = news.stats
        if news.end >= self._totals_due or not stats.num_requests_running + stats.num_requests_waiting:
            self._totals, self._totals_due = total_stats(self.stats), news.end + _TOTALS_SECONDS
        return msgspec.structs.replace(news, stats=self._totals)

    def _lose(self, replica: _Replica, error: EngineDeadError) -> None:
        """An engine is dead: move what it had not begun, once; end the rest; start it again."""
        self._leave(replica, str(error))
        self._router.loads[replica.rank] = 0
        if not any(other.serves for other in self._replicas):
            return self._on_event(Dead(f"{error} No other engine is up"))
        for route in [route for route in self._routes.values() if route.rank == replica.rank]:
            if route.request is None or route.moved:
                del self._routes[route.request_id]
                reason = f"{error} This request is not complete; another try goes to another engine."
                self._on_event(Refused(route.request_id, Fault.of(EngineDeadError(reason))))
            else:
                route.moved = True
                self._place(route)
        lived = time.monotonic() - replica.born
        replica.wait = 0.0 if lived > _STEADY_SECONDS else min(_LONGEST_WAIT, 2 * replica.wait + 1.0)
        self._start_again(replica)

    def _leave(self, replica: _Replica, reason: str) -> None:
        """An engine serves no more; calls do without its answer."""
        replica.state = "starting"
        self._router.is_open[replica.rank] = False
        self._router.forget(replica.rank)
        if replica.monitor is not None:
            replica.monitor.close()
        replica.pinning.clear()
        for call_id in list(self._calls):
            self._collect(replica.rank, Reply(call_id, fault=Fault.of(RequestFailedError(reason))))
        self._on_event(self._with_totals(replica.rank, News([], [], now := time.monotonic(), now, EngineStats())))

    # Calls, which go to all.

    def _call(self, call: Call) -> None:
        runs = any(not route.aborted for route in self._routes.values()) or any(r.pinning for r in self._replicas)
        if call.name in _OF_IDLE and runs and not (self._held or call.arguments[1:] == [True]):
            return self._on_event(Reply(call.call_id, False))  # one engine might have done it, and another not
        serving = [replica for replica in self._replicas if replica.serves]
        self._calls[call.call_id] = (call, {replica.rank for replica in serving}, {})
        for replica in serving:
            self._ask(replica, call)

    def _ask(self, replica: _Replica, call: Call) -> None:
        """Pass a call on; a prompt to be pinned is computed before."""
        if call.name == "unpin_prefix":  # nor does one that came back pin it, once it has computed it
            told, pins = (_NO_ANSWER, call.arguments[0]), replica.pinning
            replica.pinning = {own: pin for own, pin in pins.items() if (pin.call_id, pin.arguments[0]) != told}
        if call.name != "pin_prefix":
            return replica.client.send(call)
        name, token_ids, salt = call.arguments
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        task = SamplingTask(params=params, max_tokens=1, stop_token_ids=frozenset(), seed=0)
        own = f"\0pin {replica.rank} {call.call_id} {name}"  # no request's id has such a character
        replica.pinning[own] = call
        replica.client.send(Add(NewRequest(request_id=own, prompt_token_ids=token_ids, task=task, cache_salt=salt)))

    def _collect(self, rank: int, reply: Reply) -> None:
        """An engine's answer, or its death."""
        if reply.call_id not in self._calls:
            if reply.fault is not None:
                logger.warning("engine %d: %s", rank, reply.fault.message)
                if reply.call_id == _TO_BE_ALIKE:
                    self._take(self._replicas[rank], self._replicas[rank].client, Dead("it can't be as the others are"))
            return
        call, missing, replies = self._calls[reply.call_id]
        if rank in missing:
            missing.discard(rank)
            if self._replicas[rank].serves and (reply.fault is None or reply.fault.kind != "EngineDeadError"):
                replies[rank] = reply
        if not missing:
            del self._calls[reply.call_id]
            holds = any if call.name == "is_sleeping" else all
            answer = total_reply([replies[rank] for rank in sorted(replies)] or [reply], holds)
            if answer.fault is None:
                self._remember(call, answer)
            elif call.name == "pin_prefix" and call.arguments[0] not in [*self._pins]:  # nor has it to be hashable
                self._call(Call(_NO_ANSWER, "unpin_prefix", call.arguments[:1]))  # all have it, or none
            elif call.name == "update_weights":  # likewise: those that have other weights begin anew, with the others'
                for changed in [own for own, each in replies.items() if each.value]:
                    self._drain(self._replicas[changed])
            self._on_event(answer)  # nobody's, perhaps

    def _remember(self, call: Call, answer: Reply) -> None:
        """Keep what an engine that starts again has to be told."""
        if call.name == "set_limits":
            told = self._limits | call.arguments[0]
            own = OPTIONS_OF.get(told.get("policy", ""), POLICY_OPTIONS)  # another policy has forgotten the others'
            self._limits = {name: told[name] for name in told if name in own or name not in POLICY_OPTIONS}
        elif call.name == "pin_prefix":
            self._pins[call.arguments[0]] = call.arguments
        elif call.name == "unpin_prefix":
            self._pins.pop(call.arguments[0], None)
        elif call.name == "hold":
            self._held = [call] if call.arguments[0] else []
        elif call.name in ("sleep", "wake_up", "update_weights") and answer.value is not False:
            self._weights = _still_to_tell(self._weights, call)
        if call.name in _OF_IDLE and answer.value:
            self._pins.clear()
            for replica in self._replicas:
                self._router.forget(replica.rank)

    # An engine's end and return.

    def _drain(self, replica: _Replica) -> None:
        replica.state = "draining"
        self._router.is_open[replica.rank] = False
        self._renew_if_drained(replica)

    def _renew_if_drained(self, replica: _Replica) -> None:
        if replica.state == "draining" and not self._router.loads[replica.rank]:
            self._leave(replica, "it restarts")
            replica.wait = 0.0
            self._start_again(replica)

    def _start_again(self, replica: _Replica) -> None:
        replica.num_restarts += 1
        replica.starter = threading.Thread(target=self._start, args=(replica,), name="quire-restart", daemon=True)
        replica.starter.start()

    def _start(self, replica: _Replica) -> None:
        """In a thread: end what is left of an engine, and try until there is a new one."""
        replica.client.close()
        while not self._closed.wait(replica.wait):
            try:
                with self._turn:
                    if self._closed.is_set():
                        return
                    replica.client = self._make(replica.rank)
                replica.client.wait_ready()
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    self._loop.call_soon_threadsafe(self._return, replica)
                return
            except Exception as error:  # as of ZeroMQ, where no more files can be opened
                if not self._closed.is_set():
                    logger.error("engine %d does not start: %s", replica.rank, error)
                replica.client.close()
                replica.wait = min(_LONGEST_WAIT, 2 * replica.wait + 1.0)

    def _return(self, replica: _Replica) -> None:
        """A new engine is ready: tell it what was changed, and let it serve."""
        if self._closed.is_set():
            return
        replica.starter, replica.born = None, time.monotonic()
        self._join(replica)
        self._router.is_open[replica.rank] = True
        logger.info("engine %d is back", replica.rank)
        for call in [*self._weights, *self._held]:
            replica.client.send(Call(_TO_BE_ALIKE, call.name, call.arguments))
        if self._limits:
            replica.client.send(Call(_NO_ANSWER, "set_limits", [self._limits]))
        for call, missing, _ in self._calls.values():  # which the others are answering
            missing.add(replica.rank)
            self._ask(replica, call)
        for arguments in self._pins.values():
            self._ask(replica, Call(_NO_ANSWER, "pin_prefix", arguments))
        for route in [route for route in self._routes.values() if route.rank is None]:
            self._place(route)


def _still_to_tell(calls: list[Call], last: Call) -> list[Call]:
    """What a new engine has to be told of weights, in order, to be as the others are."""
    updates = [call for call in calls if call.name == "update_weights"]
    if last.name == "sleep":  # at level 2, other weights are forgotten
        return [*(updates if last.arguments[0] == 1 else ()), last]
    if last.name == "update_weights":
        return [*(call for call in calls if call.name != "update_weights"), last]
    return [*calls, last] if last.arguments[0] else updates
