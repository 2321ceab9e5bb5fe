"""From the options to a proposer. The worker asks once, at start-up; a new method is a line here."""

import math
from collections.abc import Callable

from quire.config.speculative import SpeculativeConfig
from quire.speculative.base import Proposer
from quire.speculative.draft_model import DraftModelProposer, DraftRunner
from quire.speculative.eagle import EagleProposer, EagleRunner
from quire.speculative.medusa import HeadRunner, MedusaProposer
from quire.speculative.ngram import NgramProposer
from quire.speculative.suffix import SuffixProposer

_METHODS: dict[str, Callable[[SpeculativeConfig], Proposer]] = {
    "ngram": lambda c: NgramProposer(c.num_speculative_tokens, c.lookup_min, c.lookup_max),
    "suffix": lambda c: SuffixProposer(
        c.num_speculative_tokens, c.suffix_decoding_max_spec_factor, c.suffix_decoding_max_cached_requests
    ),
}


def make_proposer(
    config: SpeculativeConfig,
    vocab_size: int,
    draft: DraftRunner | EagleRunner | None = None,
    heads: HeadRunner | None = None,
) -> Proposer:
    """What drafts tokens; `draft` runs what has caches of its own, and `heads` the heads, where the method has such."""
    proposer: Proposer
    if isinstance(draft, DraftRunner):
        proposer = DraftModelProposer(config.num_speculative_tokens, vocab_size, draft, config.acceptance)
    elif isinstance(draft, EagleRunner):
        proposer = EagleProposer(config.num_speculative_tokens, vocab_size, draft)
    elif config.method == "medusa":
        assert heads is not None, "heads are configured and not loaded"
        proposer = MedusaProposer(config, vocab_size, heads)
    else:
        proposer = _METHODS[config.method](config)
    proposer.max_batch = config.disable_by_batch_size or math.inf
    return proposer
