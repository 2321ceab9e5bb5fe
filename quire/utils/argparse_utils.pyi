"""For type checkers: see `quire.entrypoints.vllm_names`."""

from quire.entrypoints.cli.parser import Parser as FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
