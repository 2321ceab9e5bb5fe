"""Which client `AsyncLLM` gets where none is handed in: one engine, in a process of its own or in a thread."""

from quire.config.engine_args import EngineArgs, EngineConfig
from quire.engine.async_options import AsyncOptions
from quire.engine.clients.process import ProcessClient
from quire.engine.clients.thread import ThreadClient
from quire.errors import ConfigError
from quire.protocol.core import CoreClient


def start_client(args: EngineArgs, config: EngineConfig, options: AsyncOptions) -> CoreClient:
    """A client whose engine starts; ConfigError for options that need another way to start engines."""
    if (size := args.data_parallel_size) > 1:
        raise ConfigError(f"data_parallel_size={size} needs start=quire.entrypoints.server.replicas.ReplicasClient.")
    if args.distributed_executor_backend == "external_launcher":
        raise ConfigError("distributed_executor_backend='external_launcher' is for LLM, under torchrun.")
    return ThreadClient(config) if options.engine == "thread" else ProcessClient(args, options.log_level)
