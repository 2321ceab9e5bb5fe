"""The rank that this process is where somebody else started it and the others, as torchrun does: all run one program.

`select_executor` asks for it. Each process has a whole engine, which plans alike, and a worker of its own rank. They
find each other through the launcher's store, and meet in shared memory. Must not know what is computed.
"""

import contextlib
import dataclasses
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from quire import __version__
from quire.config.worker import WorkerConfig
from quire.distributed.groups import Group, segment_bytes
from quire.errors import ConfigError
from quire.utils.host_memory import make_memory
from quire.utils.logs import logger

_WORDS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TOLD = timedelta(seconds=5)  # after which a rank says for whom it waits, and again
_MEET = timedelta(seconds=120)  # for all to come: some are quicker to import what they need
_GRACE_SECONDS = 1.0  # for a rank that ended in good order: the others may be about to


def launched(config: WorkerConfig) -> WorkerConfig:
    """The configuration of this process's rank, once all ranks are there.

    Raises:
        ConfigError: this process was not started with others, or with another number of them, or they run another
            version, model or options.
    """
    given, size = [os.environ.get(word, "") for word in _WORDS], config.num_ranks
    if not all(given):
        raise ConfigError(
            f"distributed_executor_backend='external_launcher' needs {', '.join(_WORDS)} in the environment; start the "
            f"program with torchrun --nproc-per-node {size}."
        )
    if given[1] != str(size):
        raise ConfigError(f"WORLD_SIZE is {given[1]}, but tensor_parallel_size={size}; start as many processes.")
    if size == 1:
        return config
    rank, store = int(given[0]), _store(int(given[0]), *given[2:])
    store = PrefixStore(f"quire{store.add(f'quire engines of {rank}', 1)}", store)  # each engine has its own keys
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    store.set(f"place{rank}", f"{os.getpid()} {machine} {os.readlink('/proc/self/ns/pid')}")
    for i in range(size):
        with _awaited(f"rank {i} of {size} has not come within {_MEET.seconds} s, or rank 0 is gone"):
            for _ in range(_MEET // _TOLD):  # nor does a Ctrl-C end a wait
                with contextlib.suppress(DistStoreError):
                    store.wait([f"place{i}"], _TOLD)
                    break
                logger.warning("rank %d waits for rank %d, which has not come yet", rank, i)
            store.wait([f"place{i}"], _TOLD)
    places = [store.get(f"place{i}").decode().partition(" ") for i in range(size)]
    if len({machine for _, _, machine in places}) > 1:
        raise ConfigError(f"the {size} processes of 'external_launcher' must be on one machine; start them there.")
    store.set(f"runs{rank}", "\n".join([f"Quire {__version__}", *(f"{k}={v!r}" for k, v in vars(config).items())]))
    with _awaited(f"one of the {size} ranks has come, and is gone"):
        runs = [store.get(f"runs{i}").decode().split("\n") for i in range(size)]
    for i, run in enumerate(runs):
        pairs = zip(run, runs[0], strict=False)
        if differs := [f"{here[:99]} (rank 0: {first[:99]})" for here, first in pairs if here != first]:
            raise ConfigError(f"rank {i} runs something else than rank 0: {'; '.join(differs)}. Start all ranks alike.")
    if rank == 0:
        store.set("group", f"/proc/{os.getpid()}/fd/{make_memory(segment_bytes(config.model.vocab_size))}")
    where = store.get("group").decode()
    others = [int(process) for process, *_ in places if int(process) != os.getpid()]
    threading.Thread(None, _watch, "quire-watch", (store, Group(where, rank, size), others), daemon=True).start()
    return dataclasses.replace(config, rank=rank, group=where)


def _store(rank: int, host: str, port: str) -> Store:
    """The launcher's, or rank 0's where it has none."""
    keeps, door = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True", None
    with contextlib.suppress(OSError):  # this process may have one there already, of another engine
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        door = socket.create_server((host, int(port)), family=kind).detach() if keeps else None  # not on every address
    with _awaited(f"rank 0 is not at MASTER_ADDR:MASTER_PORT, {host}:{port}, or that port is in use"):
        found = TCPStore(host, int(port), None, keeps, _MEET, False, True, door)
        return PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), found)  # torchrun's outlives its ranks


@contextlib.contextmanager
def _awaited(what: str) -> Iterator[None]:
    """Name what did not come."""
    try:
        yield
    except RuntimeError as error:
        raise ConfigError(f"{what}; see what that process says, and start all ranks anew.") from error


def _watch(_: Store, group: Group, others: Sequence[int]) -> None:
    """Let who waits for another process know when that has ended; keeps the store, which may be this one's."""
    ends = select.poll()
    with contextlib.suppress(ProcessLookupError):
        for process in others:
            ends.register(os.pidfd_open(process), select.POLLIN)
        ends.poll()
    time.sleep(_GRACE_SECONDS)
    group.abort()
