"""Quire: an engine that runs large language models, offline from Python and behind an OpenAI-compatible server.

The public names load on first use, so that ``import quire`` and ``quire --help`` need no torch.
"""

import gc
import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "quire.entrypoints.llm": ("LLM",),
    "quire.engine.async_options": ("AsyncOptions",),
    "quire.entrypoints.as_vllm": ("EngineArgs", "LLMEngine", "AsyncLLM"),
    "quire.sampling_params": ("SamplingParams", "BeamSearchParams", "SamplingType", "RequestOutputKind"),
    "quire.structured_outputs": ("StructuredOutputsParams", "GuidedDecodingParams"),
    "quire.outputs": (
        *("RequestOutput", "CompletionOutput", "Logprob", "BeamSearchOutput", "BeamSearchSequence", "EmbeddingOutput"),
        *("EmbeddingRequestOutput", "PoolingOutput", "PoolingRequestOutput"),
    ),
    "quire.entrypoints.scoring": (
        *("ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
    ),
    "quire.pooling_params": ("PoolingParams",),
    "quire.lora.request": ("LoRARequest", "PromptAdapterRequest"),
    "quire.inputs": ("TextPrompt", "TokensPrompt", "PromptType"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return importlib.import_module("quire.entrypoints.vllm_names").named("quire", name)
    collects = gc.isenabled()
    gc.disable()  # it would go through half a million objects of torch's again and again, and none of them is garbage
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, without a look at each
        if collects:
            gc.enable()
    globals()[name] = value
    return value


importlib.import_module("quire.entrypoints.vllm_names").install()


def __dir__() -> list[str]:
    return sorted(__all__)
