"""How `AsyncLLM` runs its engine: what it is told beside the engine's own options."""

from dataclasses import dataclass
from typing import Literal

from quire.config.options import check_options, option


@dataclass(frozen=True)
class AsyncOptions:
    """How `AsyncLLM` runs its engine.

    Raises:
        ConfigError: an option is of another kind, or out of its range.
    """

    engine: Literal["process", "thread"] = "process"
    max_num_queued_reqs: int | None = option(None, 0)  # that may wait while others run; None: no limit
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"  # of the engine's process
    step_timeout: float = option(600.0, over=0)  # seconds in a step, or without a sign of life: then it counts as dead

    def __post_init__(self) -> None:
        check_options(self)
