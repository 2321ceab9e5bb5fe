"""Workers as actors on a Ray cluster, one for each rank: the cluster that is there, or else one on this machine.

`select_executor` hands them to the `RemoteExecutor`; this is the one home of Ray, which is an extra and imported when
asked for. Orders and answers are the bytes that processes get, as arguments and results of calls. Ranks of one node
meet in its shared memory, others over the network. Must not know what is said.
"""

import contextlib
import dataclasses
import importlib
import logging
import os
import re
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quire import __version__
from quire.config.engine_args import EngineArgs
from quire.config.worker import WorkerConfig
from quire.errors import ConfigError
from quire.executor.orders import BEAT_SECONDS, FAULT, NUMBERS, ORDERS, decoded, encoded
from quire.executor.rank import Rank
from quire.utils.logs import configure_logging, logger

SILENCE_SECONDS = 5.0  # without an answer to a beat
_ASK_SECONDS = 3.5  # for a node to say whether a process was stopped
_PLACE_SECONDS = 8.0  # for CPUs to be free
_START_SECONDS = 300.0  # for actors to be there: where others compute, Python and Ray alone take a minute
_ENDED = "out of memory, perhaps, or its node is gone: 'ray status' lists the nodes"

_LATER = {NUMBERS["begin"], NUMBERS["take"]}  # go with what asks for a result: a call costs more than its bytes


class Actor:
    """A rank in a process of Ray's."""

    def __init__(self, rank: int, level: str, num_threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)  # read when torch is imported
        configure_logging(level, f"(rank {rank}) ")
        self._rank = Rank(rank)
        self._door: socket.socket | None = None

    def place(self) -> tuple[str, str, int, str]:
        """The version of Quire, the node, the process, and where ranks find each other, which the first one keeps."""
        ray, where = importlib.import_module("ray"), ""
        host, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        if self._rank.rank == 0:
            self._door = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            where = f"{host}:{self._door.getsockname()[1]}"
        return __version__, f"{host} {node}", os.getpid(), where

    def carry_out(self, orders: list[tuple[int, bytes]]) -> tuple[int, bytes] | None:
        """The answer to the last of some orders."""
        if self._door is not None:
            from quire.distributed.network import make_place  # with torch: not before the watch looks

            self._store, self._door = make_place(self._door), None
        return [None, *(self._rank.carry_out(*order) for order in orders if not self._rank.fault)][-1]

    def beat(self) -> bytes:
        """A sign of life: the fault that ended the worker."""
        return self._rank.fault or encoded(("", ""))


class Actors:
    """Workers in the placement group of a cluster.

    Args:
        args: how many engines share it, and how actors are placed.
    """

    log = "Its log is Ray's, and on standard error"

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._actors: list[Any] = []
        self._places: list[tuple[str, str, int, str]] = []
        self._waiting = list[tuple[int, bytes]]()
        self._sender = ThreadPoolExecutor(1)  # which no Ctrl-C stops half way through the ranks
        self._group: Any = None

    def start(self, config: WorkerConfig) -> WorkerConfig:
        self._ray = ray = _connected("auto" if self._args.data_parallel_size > 1 else None)
        self._reporter = config.reporter
        self._answers = [deque[Any]() for _ in range(config.num_ranks)]
        num_cpus, bundles = self._reserve(config)
        kind = ray.remote(concurrency_groups={"pulse": 1})(Actor)
        self._strategies = importlib.import_module("ray.util.scheduling_strategies")
        strategy = self._strategies.PlacementGroupSchedulingStrategy
        for rank in range(config.num_ranks):
            place = strategy(self._group, placement_group_bundle_index=rank * bundles // config.num_ranks)
            actor, level = kind.options(num_cpus=num_cpus, scheduling_strategy=place), logger.getEffectiveLevel()
            self._actors.append(actor.remote(rank, logging.getLevelName(level), num_cpus))
        try:
            self._places = ray.get([actor.place.remote() for actor in self._actors], timeout=_START_SECONDS)
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[0]
            raise ConfigError(f"Ray started no workers ({why}); every node needs Quire installed.") from error
        if others := {version for version, *_ in self._places} - {__version__}:
            raise ConfigError(f"a node has Quire {others.pop()}, and this process {__version__}; install one on all.")
        self._beats, self._silent = [self._beat(rank) for rank in range(config.num_ranks)], [0] * config.num_ranks
        return dataclasses.replace(config, group=self._places[0][-1], nodes=tuple(place[1] for place in self._places))

    def _reserve(self, config: WorkerConfig) -> tuple[int, int]:
        """Make the placement group; returns the CPUs of each rank, and its bundles."""
        ray, args = self._ray, self._args
        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        num_cpus, bundles, strategy = placed(nodes, args)
        num_cpus = min(num_cpus, int(os.environ.get("OMP_NUM_THREADS") or num_cpus))
        ranks = config.num_ranks * args.data_parallel_size
        asked = f"{ranks} ranks ask for {num_cpus or 1} CPU each (ray_placement={args.ray_placement!r})"
        there = f"the Ray cluster has {sum(nodes)} on {len(nodes)} node(s)"
        if num_cpus:
            share = num_cpus * config.num_ranks // bundles
            self._group = ray.util.placement_group([{"CPU": share}] * bundles, strategy=strategy)
            if self._group.wait(_PLACE_SECONDS):
                return num_cpus, bundles
            there += f", of which {ray.available_resources().get('CPU', 0):g} are free: end what holds them"
        remedy = "add nodes, or lower tensor_ or pipeline_parallel_size, or OMP_NUM_THREADS, the CPUs of each rank."
        raise ConfigError(f"{asked}, but {there}; {remedy}")

    def send(self, number: int, body: bytes, check: Callable[[], object]) -> None:
        self._waiting.append((number, body))
        if number not in _LATER:
            orders, self._waiting = self._waiting, []
            self._sender.submit(self._tell, orders, list(ORDERS.values())[number].answers).result()

    def _tell(self, orders: list[tuple[int, bytes]], answers: str) -> None:
        for rank, actor in enumerate(self._actors):
            answer = actor.carry_out.remote(orders)
            if answers == "all" or (answers == "one" and rank == self._reporter):
                self._answers[rank].append(answer)

    def receive(self, rank: int, seconds: float) -> tuple[int, bytes] | None:
        answers = self._answers[rank]
        with contextlib.suppress(self._ray.exceptions.RayError):  # there is none yet, or an end, which the watch tells
            while answers:
                try:
                    answer = self._ray.get(answers[0], timeout=seconds)
                except self._ray.exceptions.RayTaskError as error:  # what its `Rank` could not catch
                    return FAULT, encoded((type(error.cause).__name__, str(error.cause)))
                answers.popleft()
                if answer is not None:
                    return answer
        return None

    def look(self, ready: bool) -> tuple[int, str] | None:
        if not self._ray.is_initialized():
            return 0, "ended unexpectedly (this process has left the Ray cluster)"
        for rank, beat in enumerate(self._beats):
            self._silent[rank] += 1
            if self._ray.wait([beat], timeout=0)[0]:
                try:
                    told = decoded(self._ray.get(beat), tuple[str, str])
                    if told[0] not in ("", "GroupAbortedError"):  # which another rank's end has brought about
                        return rank, "failed ({}: {})".format(*told)
                except self._ray.exceptions.RayError as error:
                    why = re.search(r"because (its [^.]*)", str(error)) or ["", "it can't be reached"]
                    return rank, f"ended unexpectedly ({why[1]}; {_ENDED})"
                self._beats[rank], self._silent[rank] = self._beat(rank), 0
            # While libraries are loaded there may be no beat for long, unless it was stopped.
            elif self._silent[rank] * BEAT_SECONDS >= SILENCE_SECONDS and (ready or self._is_stopped(rank)):
                return rank, f"has given no sign of life for {SILENCE_SECONDS:.0f} s"
        return None

    def _is_stopped(self, rank: int) -> bool:
        """Whether a rank's process was stopped (SIGSTOP), as another process on its node finds."""
        _, node, process, _ = self._places[rank]
        where = self._strategies.NodeAffinitySchedulingStrategy(node.split()[1], soft=False)
        asked = self._ray.remote(num_cpus=0)(_state).options(scheduling_strategy=where).remote(process)
        with contextlib.suppress(self._ray.exceptions.RayError):
            return self._ray.get(asked, timeout=_ASK_SECONDS) == "T"
        return False

    def _beat(self, rank: int) -> Any:
        return self._actors[rank].beat.options(concurrency_group="pulse").remote()

    def told(self, rank: int) -> str:
        _, node, process, _ = self._places[rank]
        return f"process {process} on Ray's node {node[:-48]}"

    def leave(self, seconds: float) -> None:
        last = [actor.carry_out.remote([]) for actor in self._actors]
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.wait(last, num_returns=len(last), timeout=seconds)

    def kill(self) -> None:
        group, self._group = self._group, None
        if group is not None and self._ray.is_initialized():  # else they have ended, and asking would begin anew
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(group)


def _state(process: int) -> str:
    """Of a process of this machine, as the kernel says it in a letter."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def placed(nodes: Sequence[int], args: EngineArgs) -> tuple[int, int, str]:
    """By the nodes' CPUs: the most that all ranks can have, 0 for none; in how many bundles; and Ray's strategy."""
    num_ranks, stages, engines = args.num_ranks, args.pipeline_parallel_size, args.data_parallel_size
    choices = {
        "STRICT_SPREAD": [(num_ranks, "STRICT_SPREAD")],
        "STRICT_PACK": [(1, "PACK")],
        # A stage on one node, each on another; else where they fit; else its ranks apart.
        "PACK": [(stages, "STRICT_SPREAD"), (stages, "PACK"), (num_ranks, "PACK")],
    }[args.ray_placement]
    for bundles, strategy in choices:
        most = engines if strategy == "STRICT_SPREAD" else sum(nodes)  # on one node
        for num_cpus in range(max(nodes, default=0), 0, -1):
            size = num_cpus * num_ranks // bundles
            if sum(min(most, node // size) for node in nodes) >= bundles * engines:
                return num_cpus, bundles, strategy
    return 0, 1, "PACK"


def _connected(address: str | None) -> Any:
    """Ray, joined to the cluster of this process, of RAY_ADDRESS or of this machine; else one that ends with us."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("distributed_executor_backend='ray' needs Ray: pip install ray.") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, ignore_reinit_error=True, include_dashboard=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where, why = os.environ.get("RAY_ADDRESS", "on this machine"), str(error).splitlines()[0]
        raise ConfigError(f"no Ray cluster {where} ({why}): 'ray start --head' there, or set RAY_ADDRESS.") from error
    with contextlib.suppress(ValueError, TypeError):  # in the main thread Ray has put its own there
        signal.signal(signal.SIGTERM, handler)
    return ray
