"""Quire: an engine that runs large language models, offline from Python and behind an OpenAI-compatible server.

The public names load on first use, so that ``import quire`` and ``quire --help`` need no torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "quire.entrypoints.llm": ("LLM",),
    "quire.engine.llm_engine": ("LLMEngine",),
    "quire.engine.async_llm": ("AsyncLLM", "AsyncLLMEngine", "AsyncOptions"),
    "quire.config.engine_args": ("EngineArgs",),
    "quire.sampling_params": ("SamplingParams", "BeamSearchParams", "SamplingType", "RequestOutputKind"),
    "quire.structured_outputs": ("StructuredOutputsParams", "GuidedDecodingParams"),
    "quire.outputs": ("RequestOutput", "CompletionOutput", "Logprob", "BeamSearchOutput", "BeamSearchSequence"),
    "quire.lora.request": ("LoRARequest", "PromptAdapterRequest"),
    "quire.inputs": ("TextPrompt", "TokensPrompt", "PromptType"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
