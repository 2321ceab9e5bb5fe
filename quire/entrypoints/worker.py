"""The entry point of a worker in a process of its own, which `ProcessesExecutor` runs as a module, one for each rank.

It carries out orders one after another, beats, and leaves when told to, when it fails, or when its standard input ends:
then its parent is gone. Each line of its log begins with its rank. Must not know how many steps are planned, nor why.
"""

import dataclasses
import faulthandler
import gc
import logging
import os
import select
import signal
import sys
import threading

from quire.errors import QuireError
from quire.executor.orders import BEAT_SECONDS, FAULT, ORDERS, Lines, decoded, encoded
from quire.utils.logs import configure_logging

_EXIT_ORPHANED = 3

logger = logging.getLogger("quire")


def main() -> int:
    """Serve a rank until told to end; 0 in good order, 1 after a fault."""
    level, (descriptor, rank, num_ranks, num_threads) = sys.argv[1], map(int, sys.argv[2:])
    if num_ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))  # read when torch is imported
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a whole group: the parent decides what it means
    faulthandler.enable(sys.stderr)
    configure_logging(level, f"(rank {rank}) ")
    lines = Lines.of(descriptor, num_ranks, rank)
    threading.Thread(target=_beat, args=(lines.beats, rank), daemon=True).start()
    worker, value = None, None
    while True:
        if (message := lines.orders.read(1.0)) is None:
            continue
        number, (name, order) = message[0], list(ORDERS.items())[message[0]]
        try:
            given = [] if order.argument is None else [decoded(message[1], order.argument)]
            if name == "load":
                from quire.worker.worker import Worker  # torch comes in here: the watch above must not wait for it

                worker = Worker(dataclasses.replace(given[0][0], rank=rank))
                value = worker.load(given[0][1] and rank == 0)
                gc.freeze()  # the model's objects are here to stay: collections need not look at them again
            else:
                value = getattr(worker, name)(*given)
        except Exception as error:
            if name != "load" or not isinstance(error, QuireError):
                logger.critical("the worker failed in %s", order.doing, exc_info=True)
            kind = "MemoryError" if isinstance(error, MemoryError | OSError) else type(error).__name__
            lines.answers[rank].write(FAULT, encoded((kind, str(error))))
            return 1
        if name == "close":
            return 0
        if order.answers == "all" or (order.answers == "first" and rank == 0):
            lines.answers[rank].write(number, encoded(value))


def _beat(beats: memoryview, rank: int) -> None:
    """Give signs of life until standard input ends: then the parent is gone."""
    while not select.select([0], [], [], BEAT_SECONDS)[0] or os.read(0, 4096):
        beats[rank] += 1
    os._exit(_EXIT_ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
