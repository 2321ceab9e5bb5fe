"""Tries grammars out in a process with little time and memory, before they are compiled where they can't be stopped.

`compiler` starts it for those that may take for ever: regexes that are intersected, say. The process compiles each for
no vocabulary, and the system ends it when that takes too much.
"""

import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time

from quire.errors import RequestFailedError
from quire.text.grammars.meter import STEP_ITEMS
from quire.utils.child import leave_ends_to_parent, start_child

_FRAME = struct.Struct("<dQ")  # seconds, bytes that follow
_MEGABYTES = 1500  # of address space
_MAX_WAIT = 10  # times its processor time that a grammar may take, on a machine that is busy with others


class Trial:
    """The process, started when first needed, and again after it was ended. For one thread, but for `end`."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def passes(self, source: str, seconds: float) -> bool:
        """Whether compiling `source` takes no more than this processor time, nor too much memory.

        Raises:
            RequestFailedError: it could not be tried here and now.
        """
        if not seconds:
            return False
        if self._child is None:
            try:
                self._child = start_child("quire.text.grammars.trial", answers=True, keys=False)
            except OSError as error:
                raise RequestFailedError(f"the process that tries grammars can't be started: {error}.") from None
        answered = self._ask(child := self._child, source.encode("utf-8", "surrogatepass"), seconds)
        if not answered:
            self.end()
            child.communicate()  # closes its pipes, which `end` can't while another thread reads one
        if answered is None:
            raise RequestFailedError("the machine is too busy to compile it; try again later.")
        return answered

    def end(self) -> None:
        """End the process, from whichever thread: what it tries just now is refused."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def _ask(self, child: subprocess.Popen[bytes], data: bytes, seconds: float) -> bool | None:
        """True when the process has compiled it, False when it was ended, None when neither came in time."""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(_FRAME.pack(seconds, len(data)) + data)
            child.stdin.flush()
        except BrokenPipeError:
            return False
        end = time.monotonic() + _MAX_WAIT * (1 + seconds)
        while threading.main_thread().is_alive() and time.monotonic() < end:
            if select.select([child.stdout], [], [], 0.1)[0]:
                return child.stdout.read(1) == b"."
        return None


def main() -> None:
    """Answer until the input ends, or the system ends this."""
    import llguidance

    leave_ends_to_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEGABYTES << 20, _MEGABYTES << 20))
    bytes_alone, limits = llguidance.LLTokenizer("byte"), llguidance.LLParserLimits(step_max_items=STEP_ITEMS)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(header := source.read(_FRAME.size)) == _FRAME.size:
        seconds, size = _FRAME.unpack(header)
        text = source.read(size).decode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        matcher = llguidance.LLMatcher(bytes_alone, text, log_level=0, limits=limits)
        if matcher.is_error():  # it has no special tokens
            llguidance.LLMatcher.validate_grammar(text)
        else:
            matcher.compute_ff_tokens()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(b".")
        sink.flush()


if __name__ == "__main__":
    main()
    os._exit(0)
