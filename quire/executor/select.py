"""Which executor an engine gets where none is handed in. The engine's builder asks once, at start-up."""

from quire.config.worker import WorkerConfig
from quire.executor.base import Executor


def select_executor(config: WorkerConfig) -> Executor:
    """An executor that is not started yet."""
    from quire.executor.inprocess import InProcessExecutor  # with torch: not before it is asked for

    return InProcessExecutor(config)
