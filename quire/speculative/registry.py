"""From the options to a proposer. The worker asks once, at start-up; a new method is a line here."""

from collections.abc import Callable

from quire.config.speculative import SpeculativeConfig
from quire.speculative.base import Proposer
from quire.speculative.ngram import NgramProposer
from quire.speculative.suffix import SuffixProposer

_METHODS: dict[str, Callable[[SpeculativeConfig], Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}


def make_proposer(config: SpeculativeConfig) -> Proposer:
    """What drafts tokens without a model of its own."""
    return _METHODS[config.method](config)
