"""What vLLM's scripts touch and Quire has under other names: options from flags, settings to read and to make engines
of, metrics as a list.

`vllm_names` says where scripts find it; `LLM` uses some of it. Everything here reads what the engine has, and keeps
nothing.
"""

import copy
from argparse import Namespace
from dataclasses import fields
from enum import Enum
from functools import cached_property, wraps
from inspect import signature
from types import SimpleNamespace
from typing import Any

from msgspec import Struct

from quire.config import engine_args
from quire.engine import async_llm, llm_engine
from quire.entrypoints import not_yet
from quire.entrypoints.cli.flags import add_option_flags
from quire.entrypoints.vllm_names import lacking
from quire.errors import EngineDeadError
from quire.protocol.stats import EngineStats
from quire.utils.answers import take_anyway
from quire.utils.keywords import PARAMETERS

# Of requests, and of engines: nobody is told who uses one, which runs at once, and where it was asked to.
_UNUSED = ("prompt_text", "trace_headers", "session_id", "reasoning_ended", "reasoning_parser_kwargs", "usage_context")
_UNUSED += ("start_engine_loop", "enable_multiprocessing")
_OPTIONS = {field.name: field.default for field in fields(engine_args.EngineArgs)}
current_platform = SimpleNamespace(device_type="cpu", is_cpu=lambda: True, is_cuda=lambda: False, is_rocm=lambda: False)


UsageContext = Enum("UsageContext", "UNKNOWN_CONTEXT LLM_CLASS API_SERVER OPENAI_API_SERVER OPENAI_BATCH_RUNNER")


class EngineArgs(engine_args.EngineArgs):
    """The options of an engine, which take vLLM's other names too, and can be a command line's flags."""

    def __init__(self, model: str = "demo", **options: Any) -> None:
        vars(self).update(vars(not_yet.engine_args(model=model, **options)))

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        """Give a parser a flag of each option, its default in the namespace (of vLLM's others None); returns it."""
        add_option_flags(parser.add_argument_group("engine options"), engine_args.EngineArgs)
        parser.set_defaults(**{name: None for name in not_yet.answers() if parser.get_default(name) is None} | _OPTIONS)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> "EngineArgs":
        """The options among parsed flags."""
        return cls(**{name: value for name, value in vars(args).items() if name in _OPTIONS})

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> SimpleNamespace:
        """All settings, as an engine's `vllm_config`; its number of blocks is None before there is one."""
        return _settings(self.resolve(), None)


def _setting(engine: Any, name: str) -> Any:
    """A part of an engine's settings; an AttributeError, with what to do instead, for names that are nowhere."""
    if name.endswith("_config") and not name.startswith("_") and hasattr(engine.vllm_config, name):
        return getattr(engine.vllm_config, name)
    raise lacking(engine, name)


def as_vllms(method: Any) -> Any:
    """A method that takes what vLLM's has besides: it has no effect, or is refused with what to do instead."""
    if hasattr(method, "__self__"):  # the class's
        return classmethod(as_vllms(method.__func__))
    own = signature(method).parameters

    def is_taken(name: str, value: Any) -> bool:
        return name in _UNUSED or not_yet.take_anyway(name, value) or take_anyway(PARAMETERS, name, value)

    def call(*args: Any, **options: Any) -> Any:
        known = {name: v for name, v in options.items() if name in own or not is_taken(name, v)}
        return method(*args, **known)

    return wraps(method)(call)


def _of_settings(engine: Any, vllm_config: Any, **options: Any) -> Any:
    """An engine by all settings, as `EngineArgs.create_engine_config` makes them of options; see `from_engine_args`."""
    return engine.from_engine_args(vllm_config.engine_args, **options)


class LLMEngine(llm_engine.LLMEngine):
    """The engine, with settings to read as scripts for vLLM do: `vllm_config`, `model_config`, `cache_config`, ..."""

    @cached_property
    def vllm_config(self) -> SimpleNamespace:
        """All settings; changing them changes nothing."""
        return _settings(self.config, len(self.core.call("snapshot").blocks))

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.tokenizer

    def reset_mm_cache(self) -> None:
        """Nothing: a prompt is text or token ids."""

    from_engine_args = as_vllms(llm_engine.LLMEngine.from_engine_args)
    from_vllm_config = classmethod(_of_settings)
    add_request = as_vllms(llm_engine.LLMEngine.add_request)
    __getattr__ = _setting


class AsyncLLM(async_llm.AsyncLLM):
    """The engine, with the same settings to read."""

    is_running, is_stopped = property(lambda self: not self.errored), property(lambda self: self.errored)
    dead_error = property(lambda self: self._monitor.dead or EngineDeadError("the engine is dead."))

    @cached_property
    def vllm_config(self) -> SimpleNamespace:
        """All settings; changing them changes nothing."""
        return _settings(self.config, self.num_blocks)

    async def get_tokenizer(self, lora_request: Any = None) -> Any:
        """The model's tokenizer, which no adapter changes."""
        return self.tokenizer

    async def get_vllm_config(self) -> SimpleNamespace:
        """All settings, as `vllm_config`."""
        return self.vllm_config

    async def get_model_config(self) -> Any:
        """The model's settings, as of `vllm_config`."""
        return self.vllm_config.model_config

    async def reset_mm_cache(self) -> None:
        """Nothing: a prompt is text or token ids."""

    from_engine_args = as_vllms(async_llm.AsyncLLM.from_engine_args)
    from_vllm_config = classmethod(_of_settings)
    generate = as_vllms(async_llm.AsyncLLM.generate)
    encode = as_vllms(async_llm.AsyncLLM.encode)
    __getattr__ = _setting


def _settings(config: engine_args.EngineConfig, num_blocks: int | None) -> SimpleNamespace:
    import torch

    args, model = config.args, config.model
    sizes = {"get_vocab_size": lambda: model.vocab_size, "get_hidden_size": lambda: model.hidden_size}
    facts = {"hf_text_config": model.hf_config, "dtype": getattr(torch, model.dtype)}
    return SimpleNamespace(
        model_config=_with(model, tokenizer=args.tokenizer or args.model, **sizes, **facts),
        cache_config=_with(args, num_gpu_blocks=num_blocks, num_cpu_blocks=0, cache_dtype=args.kv_cache_dtype),
        parallel_config=_with(args, world_size=args.num_ranks),
        scheduler_config=config.scheduler,
        speculative_config=config.speculative,
        lora_config=args if args.enable_lora else None,
        device_config=current_platform,
        engine_args=args,
    )


def _with(settings: Any, **others: Any) -> Any:
    """A copy of an object with further attributes."""
    copied = copy.copy(settings)
    vars(copied).update(others)
    return copied


class Metric(Struct):
    """A figure of the engine; of the kinds below."""

    name: str
    labels: dict[str, str]


class Counter(Metric):
    """It only grows."""

    value: int


class Gauge(Metric):
    """It goes up and down."""

    value: float


class Vector(Metric):
    """Several counters."""

    values: list[int]


class Metrics(list[Metric]):
    """Figures under the names of /metrics, one by one; as attributes those of `EngineStats`, under its own."""

    def __init__(self, stats: EngineStats, model_name: str) -> None:
        from quire.entrypoints.server.metrics import figures_of  # for few

        self.stats, labels = stats, {"model_name": model_name, "engine": "0"}
        for kind in (Gauge, Counter):
            self += [kind(name, labels, value) for name, _, value in figures_of(stats, kind is Counter)]
        if stats.speculation is not None:
            accepted = stats.speculation.num_accepted_tokens_per_pos
            self.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, accepted))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stats"], name)
