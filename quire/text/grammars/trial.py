"""Tries grammars out in a process with little time and memory, before they are compiled where they can't be stopped.

`compiler` starts it for those that may take for ever: regexes that are intersected, say. The process compiles each for
no vocabulary, and the system ends it when that takes too much.
"""

import math
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import weakref

from quire.errors import InvalidRequestError, RequestFailedError
from quire.utils.child import start_child

_FRAME = struct.Struct("<Q")
_SECONDS, _MEGABYTES = 4, 1500  # of processor time for one grammar, and of address space


class Trial:
    """The process, started when first needed, and again after it was ended. For one thread."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, source: str) -> None:
        """Raise InvalidRequestError if compiling `source` takes too much, or RequestFailedError if it can't begin."""
        if self._child is None:
            try:
                self._child = start_child("quire.text.grammars.trial", answers=True, keys=False)
            except OSError as error:
                raise RequestFailedError(f"the process that tries grammars can't be started: {error}.") from None
            weakref.finalize(self, self._child.kill)
        child, data = self._child, source.encode("utf-8", "surrogatepass")
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(_FRAME.pack(len(data)) + data)
            child.stdin.flush()
            answer = child.stdout.read(1)
        except BrokenPipeError:
            answer = b""
        if not answer:
            child.kill()
            child.wait()
            self._child = None
            raise InvalidRequestError(
                f"it takes more than {_SECONDS} s, or too much memory, to compile; use simpler regexes, and fewer of "
                "them at one place."
            )


def main() -> None:
    """Answer until the input ends, or the system ends this."""
    import llguidance

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEGABYTES << 20, _MEGABYTES << 20))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(header := source.read(_FRAME.size)) == _FRAME.size:
        end = math.ceil(time.process_time()) + _SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        llguidance.LLMatcher.validate_grammar(source.read(*_FRAME.unpack(header)).decode("utf-8", "surrogatepass"))
        sink.write(b".")
        sink.flush()


if __name__ == "__main__":
    main()
    os._exit(0)
