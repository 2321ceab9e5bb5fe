"""For type checkers: see `quire.entrypoints.vllm_names`."""

from logging import Logger

def init_logger(name: str) -> Logger: ...
