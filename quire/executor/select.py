"""Which executor an engine gets where none is handed in. The engine's builder asks once, at start-up."""

from quire.config.engine_args import EngineArgs
from quire.config.worker import WorkerConfig
from quire.executor.base import Executor
from quire.executor.remote import RemoteExecutor


def select_executor(config: WorkerConfig, args: EngineArgs) -> Executor:
    """An executor that is not started yet."""
    if args.distributed_executor_backend == "ray":
        from quire.executor.ray import Actors

        return RemoteExecutor(config, Actors(args))
    if args.has_processes:
        from quire.executor.processes import Processes

        return RemoteExecutor(config, Processes(args.cpu_bind))
    from quire.executor.inprocess import InProcessExecutor  # with torch: not before it is asked for

    if args.distributed_executor_backend == "external_launcher":
        from quire.executor.external import launched

        config = launched(config)
    return InProcessExecutor(config)
