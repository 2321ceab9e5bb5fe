"""What became of drafts: counters under the names of vLLM's.

The scheduler's outcomes tell each verified draft, `Scheduler.stats` reads them. Knows no sequence.
"""

from quire.config.draft_tree import DraftTree
from quire.protocol.stats import SpeculationStats


class DraftCounts:
    """Counters since the start; `shown` says whether there is anything that drafts, `tree` in which shape."""

    def __init__(self, shown: bool, tree: DraftTree | None = None) -> None:
        self._shown = shown
        self._tree = tree
        self._num_drafts = self._num_draft_tokens = self._num_accepted = 0
        self._per_position: list[int] = []

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """A sequence's drafts were verified, and the first few accepted."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        self._num_accepted += num_accepted
        per_position = self._per_position
        depth = num_drafts if self._tree is None else self._tree.depths[num_drafts - 1]
        if depth > len(per_position):
            per_position += [0] * (depth - len(per_position))
        for place in range(num_accepted):
            per_position[place] += 1

    def stats(self) -> SpeculationStats | None:
        """The figures of this moment; None where nothing drafts."""
        if not self._shown and not self._num_drafts:
            return None
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, self._num_accepted, self._per_position.copy())

    def restore(self, stats: SpeculationStats | None) -> None:
        """Go on from these."""
        if stats is not None:
            self._num_drafts, self._num_draft_tokens = stats.num_drafts, stats.num_draft_tokens
            self._num_accepted, self._per_position = stats.num_accepted_tokens, [*stats.num_accepted_tokens_per_pos]
