"""The engine's process: what it still does when it is told to leave."""

import threading
import time

from quire.entrypoints.engine import _let_finish


def test_a_thread_that_writes_is_waited_for_but_not_for_ever() -> None:
    go, done = threading.Event(), threading.Event()

    def write() -> None:
        go.wait()
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    _let_finish(0.01)
    assert not done.is_set()
    go.set()
    _let_finish(30)
    assert done.is_set()
