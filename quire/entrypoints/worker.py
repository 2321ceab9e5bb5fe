"""The entry point of a worker in a process of its own, one for each rank, which `quire.executor.processes` runs.

It carries out orders one after another, beats, and leaves when told to, when it fails, or when its standard input ends:
then its parent is gone. Each line of its log begins with its rank. Must not know how many steps are planned, nor why.
"""

import faulthandler
import os
import select
import signal
import sys
import threading

from quire.executor.orders import BEAT_SECONDS, NUMBERS, Lines
from quire.executor.rank import Rank
from quire.utils.logs import configure_logging

_EXIT_ORPHANED = 3


def main() -> int:
    """Serve a rank until told to end; 0 in good order, 1 after a fault."""
    level, (descriptor, rank, num_ranks, num_threads) = sys.argv[1], map(int, sys.argv[2:])
    if num_ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))  # read when torch is imported
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a whole group: the parent decides what it means
    faulthandler.enable(sys.stderr)
    configure_logging(level, f"(rank {rank}) ")
    lines = Lines.of(descriptor, num_ranks, rank)
    lines.beats[rank] += 1  # however long it took to come here, it lives: the model may be loaded before the next beat
    threading.Thread(target=_beat, args=(lines.beats, rank), daemon=True).start()
    served = Rank(rank)
    while True:
        if (message := lines.orders.read(1.0)) is None:
            continue
        if (answer := served.carry_out(*message)) is not None:
            lines.answers[rank].write(*answer)
        if served.fault or message[0] == NUMBERS["close"]:
            return int(bool(served.fault))


def _beat(beats: memoryview, rank: int) -> None:
    """Give signs of life until standard input ends: then the parent is gone."""
    while not select.select([0], [], [], BEAT_SECONDS)[0] or os.read(0, 4096):
        beats[rank] += 1
    os._exit(_EXIT_ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
