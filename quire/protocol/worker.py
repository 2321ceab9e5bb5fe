"""What is said to a worker besides its steps, and what it answers: facts, from which the engine makes sentences.

An executor carries these structs to every worker and back. They hold numbers and names, no tensors.
"""

from typing import Any, Literal

import msgspec

from quire.protocol.requests import AdapterRef


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found and loaded."""

    kernels: str  # the level in use, as "amx", "avx512_bf16", "avx2"; "torch" for no compiled kernels
    kernels_reason: Literal["asked", "best", "unserved"]  # "unserved": compiled ones don't serve this model here
    num_threads: int
    is_small_model: bool  # so small that one thread is used although there are more
    quantization: str | None  # weight format made at load time, or the checkpoint's
    kv_cache_dtype: str  # "auto" or a format's name
    num_parameters: int
    num_files: int
    num_bytes: int  # of the weights as they lie in the files
    weight_bytes: int  # of the weights as they lie in memory, those of what drafts too
    seconds: float  # that loading took


class CheckIntegrity(msgspec.Struct, frozen=True, tag=True):
    """Look whether rows are consistent, and are those of exactly these sequences."""

    live_sequence_ids: list[int] | None  # ascending; None: not to be told now, as plans are in flight


class Invoke(msgspec.Struct, frozen=True, tag=True):
    """Call a method of `quire.worker.keeper.Keeper`, or else of its `quire.worker.worker.Worker`, by name."""

    method: str
    arguments: list[Any] = []


class CallReply(msgspec.Struct, frozen=True, tag=True):
    """What a call came to."""

    fault: str | None  # None where everything agrees, or went well
    value: Any = None


class Returned(msgspec.Struct, frozen=True, tag=True):
    """What a method returned, of each worker."""

    values: list[Any]


class PlaceAdapters(msgspec.Struct, frozen=True, tag=True):
    """Put adapters in their places, as soon as they are loaded; told again, and again answered, until they are."""

    wanted: list[tuple[int, AdapterRef]]  # place, and who belongs there
    seconds: float = 0.0  # to wait for those that are being loaded


class AdapterReply(msgspec.Struct, frozen=True, tag=True):
    """What became of those that `PlaceAdapters` wants, by id."""

    ready: list[int]  # in their places
    failed: list[tuple[int, str]]  # with the reason; they will not come


WorkerCall = CheckIntegrity | Invoke | PlaceAdapters
WorkerReply = CallReply | AdapterReply
