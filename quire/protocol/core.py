"""What crosses between the front end and the engine core, in a thread or in a process: commands down, events up.

`AsyncLLM` sends commands through a `CoreClient`, `CoreLoop` carries them out and sends events. All are msgspec structs
told apart by their tag, so that a process border changes nothing. Must not know transports, nor torch.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from quire import errors
from quire.protocol.cache import PinnedPrefix
from quire.protocol.requests import NewRequest
from quire.protocol.stats import EngineSnapshot, EngineStats, Limits
from quire.protocol.step import SequenceOutput
from quire.protocol.worker import Returned

# Methods of `quire.engine.core.EngineCore`.
_Call = Literal["snapshot", "set_limits", "reset_prefix_cache", "pin_prefix", "unpin_prefix", "pinned_prefixes", "hold"]
_OfWeights = Literal["sleep", "wake_up", "is_sleeping", "update_weights", "call_workers", "close_disk"]
CallName = _Call | _OfWeights | Literal["check_integrity"]


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An error of `quire.errors` on its way, with its attributes."""

    kind: str  # name of the class
    message: str
    facts: dict[str, Any] = {}

    @classmethod
    def of(cls, error: errors.QuireError) -> "Fault":
        """What crosses of an error; one of a class that is not at home there crosses as what that is derived from."""
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return cls(kind.__name__, str(error), vars(error))

    def error(self) -> errors.QuireError:
        """The error, to be raised."""
        found = getattr(errors, self.kind)(self.message)
        vars(found).update(self.facts)
        return found


class Add(msgspec.Struct, frozen=True, tag=True):
    """Queue a request; an event `Refused` comes back if the scheduler can't take it."""

    request: NewRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End requests; their last outputs come as `News`. Unknown ids are ignored."""

    request_ids: list[str]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End sequences (request id, index) whose stop string was found; nothing comes back."""

    sequences: list[tuple[str, int]]


class Call(msgspec.Struct, frozen=True, tag=True):
    """Have the core do something; an event `Reply` of the same id comes back, with what its method returns."""

    call_id: int
    name: CallName
    arguments: list[Any] = []


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded: the first event."""

    max_model_len: int  # tokens; less than asked for where the KV cache holds no more
    num_blocks: int
    block_size: int  # tokens


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The model could not be loaded: the only event."""

    fault: Fault


class News(msgspec.Struct, frozen=True, tag=True):
    """What a step brought. Times are in seconds of the machine's monotonic clock, which all its processes share."""

    outputs: list[SequenceOutput]
    scheduled: list[str]  # requests that were new, or back from a preemption, in the step
    start: float  # of the step
    end: float
    stats: EngineStats


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request was not taken, or broke in being taken, or was lost with one of several engines."""

    request_id: str
    fault: Fault


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to a call, or why there is none."""

    call_id: int
    value: EngineSnapshot | Limits | PinnedPrefix | list[PinnedPrefix] | Returned | bool | None = None
    fault: Fault | None = None


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, every second."""

    seconds_in_step: float  # 0.0 between steps


class Dead(msgspec.Struct, frozen=True, tag=True):
    """The engine can't go on: the last event."""

    message: str


Command = Add | Abort | Finish | Call | Stop
Event = Ready | Failed | News | Refused | Reply | Beat | Dead


class CoreClient(Protocol):
    """A running engine core, seen from the front end's event loop."""

    def wait_ready(self) -> Ready:
        """Wait until the model is loaded.

        Raises:
            ConfigError, NotYetSupportedError, ModelLoadError: as the core met them.
            EngineDeadError: it ended without a word.
        """
        ...

    def attach(self, on_event: Callable[[Event], None]) -> None:
        """From now on call `on_event` in the running event loop for each event; `Dead` comes once at most."""

    def send(self, command: Command) -> None:
        """Pass a command down, without waiting."""

    def seconds_stuck(self) -> float:
        """How long the core has been in one step, or has given no sign of life."""
        ...

    def close(self) -> None:
        """End the core, politely for a few seconds and then by force; safe to call twice."""
