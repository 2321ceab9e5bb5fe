"""The rank that this process is where somebody else started it and the others, as torchrun does: all run one program.

`select_executor` asks for it. Each process has a whole engine, which plans alike, and a worker of its own rank. They
find each other through the launcher's store, and meet in shared memory. Must not know what is computed.
"""

import contextlib
import dataclasses
import os
import select
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import PrefixStore, Store, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from quire import __version__
from quire.config.worker import WorkerConfig
from quire.distributed.groups import Group, segment_bytes
from quire.errors import ConfigError
from quire.utils.host_memory import make_memory

_WORDS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
    rank, store = int(given[0]), next(iter(rendezvous("env://")))[0]
    store = PrefixStore(f"quire{store.add(f'quire engines of {rank}', 1)}", store)  # each engine has its own keys
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    store.set(f"place{rank}", f"{os.getpid()} {machine} {os.readlink('/proc/self/ns/pid')}")
    places = [store.get(f"place{i}").decode().partition(" ") for i in range(size)]
    if len({machine for _, _, machine in places}) > 1:
        raise ConfigError(f"the {size} processes of 'external_launcher' must be on one machine; start them there.")
    own = [f"Quire {__version__}", *(f"{name}={value!r}" for name, value in vars(config).items())]
    store.set(f"runs{rank}", "\n".join(own))
    runs = [store.get(f"runs{i}").decode().split("\n") for i in range(size)]
    for i, run in enumerate(runs):
        pairs = zip(run, runs[0], strict=False)
        if differs := [f"{here[:99]} (rank 0: {first[:99]})" for here, first in pairs if here != first]:
            raise ConfigError(f"rank {i} runs something else than rank 0: {'; '.join(differs)}. Start all ranks alike.")
    if rank == 0:
        store.set("group", f"/proc/{os.getpid()}/fd/{make_memory(segment_bytes(config.model.vocab_size))}")
    where = store.get("group").decode()
    others = [int(process) for process, *_ in places if int(process) != os.getpid()]
    watched = (store, Group(where, rank, size), others)
    threading.Thread(target=_watch, args=watched, name="quire-watch", daemon=True).start()
    return dataclasses.replace(config, rank=rank, group=where)


def _watch(_: Store, group: Group, others: Sequence[int]) -> None:
    """Let who waits for another process know when that has ended; keeps the store, which may be this one's."""
    ends = select.poll()
    with contextlib.suppress(ProcessLookupError):
        for process in others:
            ends.register(os.pidfd_open(process), select.POLLIN)
        ends.poll()
    time.sleep(_GRACE_SECONDS)
    group.abort()
