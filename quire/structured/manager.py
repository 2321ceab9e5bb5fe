"""The grammars of an engine: compiled in threads of their own, kept by content, handed out to sequences.

The scheduler asks for a request's grammar and goes on without waiting; who awaits one is its own to know. The threads
are there while there is something to compile. It knows no requests, plans or results.
"""

import contextlib
import logging
import queue
from collections import OrderedDict
from typing import Any

import msgspec

from quire.errors import InvalidRequestError, QuireError
from quire.structured.matcher import Grammar
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammars.compiler import Compiler, Vocabulary
from quire.text.grammars.lanes import Lanes

logger = logging.getLogger(__name__)

MAX_GRAMMARS = 256  # kept
# Of their sources, together: of a long choice each stands for 200 bytes of its automaton. What a second of compiling
# makes, as of a large divisor whose source is short, weighs as much as so many.
MAX_KEPT_BYTES = 2**21
BYTES_PER_SECOND = 2**19


class GrammarManager:
    """Compiles grammars, and keeps those used last; of what can't be compiled, the reason.

    Attributes:
        num_words: 32-bit words of a mask.
        compiler: of all grammars.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.num_words = -(-vocabulary.size // 32)
        self.compiler = Compiler(vocabulary)
        self._end_ids = vocabulary.eos_token_ids
        self._kept: OrderedDict[bytes, Grammar | str] = OrderedDict()
        self._weights: dict[bytes, int] = {}  # of those
        self._compiling: set[bytes] = set()
        self._made: queue.SimpleQueue[tuple[bytes, Grammar | str, int]] = queue.SimpleQueue()
        self._lanes = Lanes(self.compiler, self._put)

    def key(self, params: StructuredOutputsParams) -> bytes:
        """What a grammar is kept by."""
        return msgspec.msgpack.encode(params)

    def get(self, key: bytes) -> Grammar | None:
        """A grammar that was compiled and is still there."""
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return found if isinstance(found, Grammar) else None

    def compile(self, key: bytes, params: StructuredOutputsParams) -> None:
        """Begin to compile a grammar, unless that has begun already; `take` brings it."""
        if key in self._kept:  # refused before, as a rule
            self._made.put((key, self._kept[key], self._weights[key]))
        elif key not in self._compiling:
            self._compiling.add(key)
            self._lanes.put(key, params)

    def take(self, timeout: float = 0.0) -> list[tuple[bytes, Grammar | str]]:
        """What has been compiled since the last call, or why it could not be; waits for the first so many seconds."""
        made: list[tuple[bytes, Grammar | str, int]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                made.append(self._made.get(timeout > 0 and not made, timeout or None))
        for key, found, weight in made:
            self._compiling.discard(key)
            if weight:
                self._keep(key, found, weight)
        return [(key, found) for key, found, _ in made]

    def _keep(self, key: bytes, found: Grammar | str, weight: int) -> None:
        self._kept[key], self._weights[key] = found, weight
        while len(self._kept) > 1 and (len(self._kept) > MAX_GRAMMARS or sum(self._weights.values()) > MAX_KEPT_BYTES):
            del self._weights[self._kept.popitem(last=False)[0]]

    def _put(self, key: bytes, made: Any, seconds: float) -> None:
        """A grammar is compiled, or an exception says why not. Called in the threads."""
        if not isinstance(made, Exception):
            self._made.put((key, Grammar(made, self._end_ids), len(key) + int(seconds * BYTES_PER_SECOND)))
        elif isinstance(made, QuireError):  # unless it is the request's fault, the next time may be better
            self._made.put((key, str(made), len(key) if isinstance(made, InvalidRequestError) else 0))
        else:
            logger.error("a grammar could not be compiled", exc_info=made)
            self._made.put((key, f"{type(made).__name__} while it was compiled.", 0))
