"""The entry point of an engine core in a process of its own, which `quire.engine.clients.process` runs.

It loads the model, serves, and leaves when told to, when it fails, or when its standard input ends: then its parent is
gone. Its options come there first, as a line of JSON. Must not know who asks for what.
"""

import gc
import logging
import os
import shutil
import sys
import threading
import time

import msgspec

from quire.config.engine_args import EngineArgs
from quire.engine.clients.process import CLOSE_SECONDS, WRITING_SECONDS, Birth, ChildEnd
from quire.errors import QuireError
from quire.executor.binding import cpus_of_ranks
from quire.protocol.core import Failed, Fault
from quire.utils.child import leave_ends_to_parent
from quire.utils.logs import configure_logging, logger

_EXIT_ORPHANED = 3


def main() -> int:
    """The child: load the model, serve, and leave when told to or when the parent is gone."""
    sys.setswitchinterval(1e-3)  # seconds: of a thread that computes beside the loop, as one that loads an adapter
    # The front end, whose work is short, goes first: requests that trickle in cost the engine whole steps.
    os.nice(5)
    leave_ends_to_parent()
    if not (line := sys.stdin.buffer.readline()).endswith(b"\n"):
        return _EXIT_ORPHANED
    birth = msgspec.json.decode(line, type=Birth)
    configure_logging(birth.log_level, f"engine {birth.rank}: " if birth.args.data_parallel_size > 1 else "")
    logging.getLogger("quire.config").setLevel(logging.ERROR)  # the front end has read, and told, the same
    _take_share(birth.args, birth.rank)
    leaving = threading.Event()
    threading.Thread(target=_watch_parent, args=(birth.directory, leaving), daemon=True).start()
    end = ChildEnd(birth.directory)
    try:
        gc.disable()  # of what is made from here on nothing is garbage
        from quire.engine.build import build_core  # torch comes in here: the watch above must not wait for it
        from quire.engine.loop import CoreLoop

        core = build_core(birth.args.resolve(), show_progress=sys.stderr.isatty(), rank=birth.rank)
        loop = CoreLoop(core, end.receive, end.send)
    except QuireError as error:
        end.send(Failed(Fault.of(error)))
        end.destroy()
        return 1
    gc.freeze()  # the model's objects are here to stay: collections need not look at them again
    gc.enable()
    threading.Thread(target=end.beat, args=(lambda: loop.step_start,), daemon=True).start()
    end.send(loop.ready())
    alive = loop.run()
    leaving.set()
    end.close()
    if alive:
        loop.core.stop()
    _let_finish(WRITING_SECONDS)
    return 0 if alive else 1


def _take_share(args: EngineArgs, rank: int) -> None:
    """Of several engines, each takes its part of the cores: its number of threads, and those very cores by default."""
    size = args.data_parallel_size
    if size == 1 or args.distributed_executor_backend == "ray":
        return
    share = cpus_of_ranks("auto", size)[rank]
    if share and args.cpu_bind == "auto" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(share))))


def _let_finish(seconds: float) -> None:
    """Wait that long for the threads that the interpreter would wait for: packed weights are being written."""
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def _watch_parent(directory: str, leaving: threading.Event) -> None:
    """Leave when standard input ends: the parent is gone, or closing and about to wait."""
    while sys.stdin.buffer.read(4096):
        pass
    if not leaving.wait(CLOSE_SECONDS - 0.5):
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(_EXIT_ORPHANED)


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        logger.critical("the engine's process failed", exc_info=True)
        code = 1
    logging.shutdown()
    os._exit(code)  # at once: nothing is left to save, and threads of libraries may linger
