"""For type checkers: see `quire.entrypoints.vllm_names`."""

from quire.entrypoints.as_vllm import EngineArgs

AsyncEngineArgs = EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
