"""Which models `quire serve A B ...` and `--models-dir` name, what each would take, and what they share.

`quire.entrypoints.cli.serve` calls it before anything is loaded; it reads configurations, and sizes of files.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.config.engine_args import EngineArgs
from quire.config.gguf import weight_files
from quire.entrypoints.server.loading import Limits
from quire.entrypoints.server.options import ServerArgs
from quire.entrypoints.server.room import Room, read_room
from quire.errors import ConfigError, NotYetSupportedError, QuireError
from quire.kvcache.capacity import CPU_SHARE
from quire.utils.host_memory import available_memory_bytes
from quire.utils.logs import logger

_MAX_LOADED = 3  # as Ollama has it on a CPU


@dataclass(frozen=True)
class Listed:
    """One of the models. `args` make its engine."""

    name: str
    args: EngineArgs
    num_bytes: int = 0  # of its weights' files
    max_model_len: int | None = None  # None: it can't be read
    room: Room = Room()
    error: str | None = None


@dataclass(frozen=True)
class Catalog:
    """The models, in order, and how they share the machine."""

    models: list[Listed]
    limits: Limits

    def describe(self) -> str:
        """A line for whoever starts the server."""
        keep, most = self.limits.keep_alive, self.limits.max_loaded
        idle = f"after {keep:g} s without work" if keep > 0 else "to make room only" if keep < 0 else "as soon as idle"
        most_kv = max(listed.room.kv_cache for listed in self.models)
        free, each = (f"{size / 2**30:.2f} GiB" for size in (self.limits.memory, most_kv))
        return (
            f"{len(self.models)} models, loaded at their first request and unloaded {idle}; at most {most} at a time, "
            f"in {free} of free memory, each with up to {each} for its KV cache and steps"
        )


def is_catalog(models: Sequence[str], args: ServerArgs) -> bool:
    """Whether the options ask for models that come and go, and not for one that is there from the start."""
    return len(models) > 1 or args.models_dir is not None or args.keep_alive is not None


def read_catalog(models: Sequence[str], args: ServerArgs, engine_args: EngineArgs) -> Catalog:
    """Find the models, and divide what is free among those that may be loaded at once.

    Raises:
        ConfigError, NotYetSupportedError: the options.
        ModelLoadError: a model that was named is not there; one of `models_dir` is kept, with its error.
    """
    _refuse(args, engine_args)
    named = [(name, name) for name in models]
    if args.served_model_name is not None:
        if args.models_dir is not None:
            raise ConfigError("served_model_name: models of models_dir go by their folders' names; leave it out.")
        if len(args.served_model_name) != len(models):
            count = f"{len(args.served_model_name)} names for {len(models)} models"
            raise ConfigError(f"served_model_name has {count}: give one for each, in their order.")
        named = list(zip(args.served_model_name, models, strict=True))
    found = _folders(args.models_dir) if args.models_dir is not None else []
    _check_once(named, found)
    most = min(args.max_loaded_models or _MAX_LOADED, len(named) + len(found))
    if engine_args.kv_cache_memory is None and engine_args.num_kv_blocks is None:
        share = (engine_args.gpu_memory_utilization or CPU_SHARE) / most
        engine_args = replace(engine_args, gpu_memory_utilization=share)
    free = available_memory_bytes()
    listed = [_read(name, replace(engine_args, model=path), free) for name, path in named]
    for name, path in found:
        try:
            listed.append(_read(name, replace(engine_args, model=path), free))
        except (QuireError, OSError) as error:
            logger.warning("the model %r of models_dir can't be served: %s", name, error)
            listed.append(Listed(name, replace(engine_args, model=path), error=str(error)))
    keep_alive = 300.0 if args.keep_alive is None else args.keep_alive
    return Catalog(listed, Limits(most, free, keep_alive, args.max_model_wait))


def _refuse(args: ServerArgs, engine_args: EngineArgs) -> None:
    """What is for one model only."""
    if (size := engine_args.data_parallel_size) > 1:
        raise ConfigError(f"data_parallel_size={size} is for one model: each of several has one engine; leave it out.")
    if args.lora_modules or args.prompt_adapters or args.allowed_adapter_dir is not None:
        options = "lora_modules, prompt_adapters, allowed_adapter_dir"
        raise ConfigError(f"{options}: they are for one model alone; leave them out.")
    if args.engine == "thread":
        raise ConfigError("engine='thread' is for one model: each of several has a process of its own; leave it out.")
    if engine_args.kv_events_config is not None:
        raise NotYetSupportedError("kv_events_config: several models can't publish at one endpoint; leave it out.")


def _folders(directory: str) -> list[tuple[str, str]]:
    """Name and path of the models in a folder."""
    path = Path(directory).expanduser()
    if not os.path.isdir(path):  # nor is a name that is too long
        raise ConfigError(f"models_dir {directory!r} is no folder; give one whose sub-folders are models.")
    found = sorted(entry for entry in path.iterdir() if (entry / "config.json").is_file() or any(entry.glob("*.gguf")))
    if not found:
        hint = " It is a model itself: give it as MODEL." if (path / "config.json").is_file() else ""
        raise ConfigError(f"models_dir {directory!r} has no model: no sub-folder has a config.json or *.gguf.{hint}")
    return [(entry.name, str(entry)) for entry in found]


def _check_once(named: Sequence[tuple[str, str]], found: Sequence[tuple[str, str]]) -> None:
    """No name is there twice, nor a folder among those that are named; links of `models_dir` are names for one."""
    names = [name for name, _ in (*named, *found)]
    places = [os.path.realpath(path) if os.path.isdir(path) else path for _, path in named]
    for given, count in [*Counter(names).items(), *Counter(places).items()]:
        if count > 1:
            raise ConfigError(f"the model {given!r} is given twice; give each once.")


def _read(name: str, args: EngineArgs, free: int) -> Listed:
    config, room = read_room(args, free)
    size = sum(file.stat().st_size for file in weight_files(config.model.path))
    return Listed(name, args, size, config.model.max_model_len, room)
