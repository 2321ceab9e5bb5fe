"""How many processes share the work, and how: sizes of each kind of parallelism, executor, cores.

`EngineArgs` has these options; the executor's choice and the workers' configurations follow from them. A value that
nothing carries out yet is refused here by name, so that no flag is silently ignored.
"""

from dataclasses import dataclass, fields
from typing import Literal

from quire.config.options import option
from quire.errors import ConfigError, NotYetSupportedError

Router = Literal["cache_aware", "least_loaded", "round_robin"]
Backend = Literal["uni", "mp", "ray", "external_launcher"]


@dataclass(frozen=True)
class Stage:
    """A part of a model's stack of layers, and what stands before and after the stack where it reaches that far."""

    number: int
    layers: range
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True)
class ParallelConfig:
    """Options of parallelism, under vLLM's names.

    Raises:
        ConfigError: options contradict each other.
        NotYetSupportedError: a size or a backend that this version lacks.
    """

    tensor_parallel_size: int = option(1, 1, short="-tp")
    """Processes that share each layer."""
    pipeline_parallel_size: int = option(1, 1, short="-pp")
    """Processes that share the stack of layers."""
    pp_partition: str | None = option(None)
    """Layers of each of those stages, as '10,14'; by default as even as may be, the last ones fewer."""
    data_parallel_size: int = option(1, 1, short="-dp")
    """Engines, each with a copy of the model."""
    data_parallel_router: Router = option("cache_aware")
    """Which engine gets a request: who has computed most of its prompt before, unless overloaded; the least loaded; or
    each in turn."""
    enable_expert_parallel: bool = option(False, short="-ep")
    """Each of the tensor_parallel_size ranks has some of the experts, and not a part of each."""
    distributed_executor_backend: Backend | None = option(None)
    """Where workers run: 'uni' (this process), 'mp' (processes of this machine), 'ray' (actors on a cluster), or
    'external_launcher' (this process and others that torchrun started); 'uni' by default for one worker, and 'mp'
    for more."""
    ray_placement: Literal["PACK", "STRICT_PACK", "STRICT_SPREAD"] = option("PACK")
    """Nodes of a Ray cluster: one for each stage where its ranks fit ('PACK'), one for all ranks, or one for each."""
    tp_collective: Literal["gather", "reduce"] = option("gather")
    """'gather': answers are those of one process, bit for bit; 'reduce': ranks meet half as often, but add up parts of
    sums: answers are not those of one process, though the same in every run and batch."""
    cpu_bind: str = option("auto")
    """Cores of the worker processes: 'auto' (an even share each), 'none', or a list by rank, as '0-1|2-3'."""

    def __post_init__(self) -> None:
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel=True shares experts among ranks: raise tensor_parallel_size above 1."
            )
        if self.tp_collective == "reduce" and self.tensor_parallel_size == 1:
            raise ConfigError("tp_collective='reduce' sums up parts of ranks: raise tensor_parallel_size above 1.")
        backend = self.distributed_executor_backend
        if backend == "external_launcher" and max(self.pipeline_parallel_size, self.data_parallel_size) > 1:
            raise NotYetSupportedError("'external_launcher' has one engine, and no stages yet; use 'mp' for these.")
        if self.cpu_bind not in ("auto", "none") and (backend == "ray" or not self.has_processes):
            raise ConfigError(f"cpu_bind={self.cpu_bind!r} needs distributed_executor_backend='mp'; give that too.")

    def partition(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each stage of a model with so many (ConfigError where they can't be shared so)."""
        stages = self.pipeline_parallel_size
        if stages > num_layers:
            raise ConfigError(f"pipeline_parallel_size={stages} exceeds the model's {num_layers} layers; lower it.")
        if self.pp_partition is None:
            return tuple((num_layers + stages - 1 - stage) // stages for stage in range(stages))
        parts = self.pp_partition.split(",")
        given = tuple(int(part) if part.strip().isdecimal() else 0 for part in parts)
        if len(given) != stages or sum(given) != num_layers or not all(given):
            raise ConfigError(
                f"pp_partition={self.pp_partition!r} must be {stages} numbers above 0 (pipeline_parallel_size), as "
                f"'10,14', that sum to the model's {num_layers} layers; leave it out for equal stages."
            )
        return given

    @property
    def num_ranks(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_processes(self) -> bool:
        """Whether workers are processes of their own."""
        backend = self.distributed_executor_backend
        return backend in ("mp", "ray") or (self.num_ranks > 1 and backend != "external_launcher")


PARALLEL_OPTIONS = tuple(field.name for field in fields(ParallelConfig))
