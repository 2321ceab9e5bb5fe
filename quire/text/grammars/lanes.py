"""Threads that compile grammars, each at its own pace: whoever is behind in one holds up nobody in another.

`quire.structured` makes them. All grammars begin in the first lane; one that may take long goes on to the next, where
it is tried in a process first, and one that took long there to the next again, which gives it more. It knows no
requests, and keeps nothing.
"""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammars.compiler import NUM_PACES, Compiler, TooLongError
from quire.utils.child import work_behind_others

Item = tuple[bytes, StructuredOutputsParams]


class Lane:
    """Items worked on one after another, in a thread that is there while there are any."""

    def __init__(self, work: Callable[[Item], None]) -> None:
        self._work = work
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._works = False  # whether the thread is there, and will look at the items once more

    def put(self, item: Item) -> None:
        """To be worked on when all before it are done."""
        with self._turn:
            self._items.put(item)
            if not self._works:
                self._works = True
                # No daemon: llguidance does not survive that the interpreter ends while it works.
                threading.Thread(target=self._run, name="quire-grammars").start()

    def _run(self) -> None:
        work_behind_others()
        while True:
            with self._turn:
                if self._items.empty() or not threading.main_thread().is_alive():
                    self._works = False
                    return
                item = self._items.get()
            self._work(item)


class Lanes:
    """All lanes of an engine.

    Args:
        compiler: what does the work.
        done: is told each grammar's key with llguidance's matcher, or why there is none, and the processor time that
            this took in the end; in whichever thread.
    """

    def __init__(self, compiler: Compiler, done: Callable[[bytes, Any, float], None]) -> None:
        self._compiler, self._done = compiler, done
        self._lanes = [Lane(partial(self._compile, pace)) for pace in range(NUM_PACES)]

    def put(self, key: bytes, params: StructuredOutputsParams) -> None:
        """Compile it."""
        self._lanes[0].put((key, params))

    def _compile(self, pace: int, item: Item) -> None:
        (key, params), start = item, time.thread_time()
        try:
            made = self._compiler.compile(params, pace)
        except TooLongError:
            return self._lanes[pace + 1].put(item)
        except Exception as error:
            made = error
        self._done(key, made, time.thread_time() - start)
