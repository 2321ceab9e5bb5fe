"""What an executor orders of workers in other processes: a table of messages, and the layout of their memory.

Both ends read it: `quire.executor.remote` and `quire.executor.rank`. An order is a method of
`quire.worker.worker.Worker` with one argument at most, of `quire.protocol`. Must not know torch.
"""

import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.config.worker import WorkerConfig
from quire.executor.transport import PIPE_BYTES, Pipe
from quire.protocol.cache import CacheLayout, CacheReport
from quire.protocol.step import SampleGuide, StepPlan, StepResult
from quire.protocol.worker import WorkerCall, WorkerReply, WorkerReport

BEAT_SECONDS = 0.5
_BEATS = 4096  # bytes, a line a rank


class Order(NamedTuple):
    """One of a worker's methods; its place in ORDERS is its messages' number."""

    doing: str  # for an error's text
    argument: Any = None  # its type
    reply: Any = None
    answers: str = "all"  # the ranks whose answer is awaited: "all", "one" (the executor's reporter) or "none"


ORDERS = {
    "load": Order("loading the model", tuple[WorkerConfig, bool], WorkerReport),
    "cache_report": Order("measuring memory", None, CacheReport),
    "initialize_cache": Order("making the KV cache", CacheLayout),
    "begin": Order("computing a step", StepPlan, answers="none"),
    "finish": Order("computing a step", SampleGuide | None, StepResult, "one"),
    "take": Order("computing a step", StepResult, answers="none"),
    "reset": Order("beginning anew"),
    "call": Order("answering a call", WorkerCall, WorkerReply),
    "close": Order("ending", answers="none"),
}
NUMBERS = {name: number for number, name in enumerate(ORDERS)}
FAULT = len(ORDERS)  # a worker's last answer: its error's class and text


class Lines(NamedTuple):
    """All that an executor and its workers say to each other."""

    beats: memoryview  # of each rank, counted up: signs of life
    orders: Pipe  # to all ranks
    answers: list[Pipe]  # of each

    @classmethod
    def of(cls, descriptor: int, num_ranks: int, rank: int = 0) -> "Lines":
        """The lines in a shared memory of `lines_bytes`, as a rank, or the executor, sees them."""
        memory = mmap.mmap(descriptor, 0)
        answers = [Pipe(memory, _BEATS + (1 + i) * PIPE_BYTES, 1, 0) for i in range(num_ranks)]
        return cls(memoryview(memory)[:_BEATS].cast("q")[::8], Pipe(memory, _BEATS, num_ranks, rank), answers)


def lines_bytes(num_ranks: int) -> int:
    """Size of the memory that the lines are in."""
    return _BEATS + (1 + num_ranks) * PIPE_BYTES


def decoded(body: bytes | bytearray, kind: Any) -> Any:
    """What was encoded, held against its type."""
    return _decoder(kind).decode(body)


_decoder = cache(lambda kind: msgspec.msgpack.Decoder(kind, dec_hook=lambda _, text: Path(text)))
encoded = msgspec.msgpack.Encoder(enc_hook=os.fspath).encode  # a Path is all that needs a hook
