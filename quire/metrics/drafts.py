"""What became of drafts: counters under the names of vLLM's.

The scheduler's outcomes tell each verified draft, `Scheduler.stats` reads them. Knows no sequence.
"""

from msgspec import structs

from quire.config.draft_tree import DraftTree
from quire.protocol.stats import SpeculationStats


class DraftCounts:
    """Counters since the start; `tree`: the shape of drafts, where they are no chain."""

    def __init__(self, tree: DraftTree | None = None) -> None:
        self._tree = tree
        self._counts = SpeculationStats()

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """A sequence's drafts were verified, and the first few accepted."""
        counts = self._counts
        counts.num_drafts += 1
        counts.num_draft_tokens += num_drafts
        counts.num_accepted_tokens += num_accepted
        per_position = counts.num_accepted_tokens_per_pos
        depth = num_drafts if self._tree is None else self._tree.depths[num_drafts - 1]
        per_position += [0] * (depth - len(per_position))
        for place in range(num_accepted):
            per_position[place] += 1

    def stats(self) -> SpeculationStats:
        """The figures of this moment."""
        return structs.replace(self._counts, num_accepted_tokens_per_pos=[*self._counts.num_accepted_tokens_per_pos])
