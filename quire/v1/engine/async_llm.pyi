"""For type checkers: see `quire.entrypoints.vllm_names`."""

from quire.engine.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
