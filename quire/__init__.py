"""Quire: an engine that runs large language models, offline from Python and behind an OpenAI-compatible server.

The public names load on first use, so that ``import quire`` and ``quire --help`` need no torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "quire.entrypoints.llm",
    "LLMEngine": "quire.engine.llm_engine",
    "AsyncLLM": "quire.engine.async_llm",
    "AsyncLLMEngine": "quire.engine.async_llm",
    "AsyncOptions": "quire.engine.async_llm",
    "EngineArgs": "quire.config.engine_args",
    "SamplingParams": "quire.sampling_params",
    "BeamSearchParams": "quire.sampling_params",
    "SamplingType": "quire.sampling_params",
    "StructuredOutputsParams": "quire.structured_outputs",
    "GuidedDecodingParams": "quire.structured_outputs",
    "RequestOutputKind": "quire.sampling_params",
    "RequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "Logprob": "quire.outputs",
    "BeamSearchOutput": "quire.outputs",
    "BeamSearchSequence": "quire.outputs",
    "TextPrompt": "quire.inputs",
    "TokensPrompt": "quire.inputs",
    "PromptType": "quire.inputs",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
