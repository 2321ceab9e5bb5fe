"""Counters of drafts: by place in a chain, by depth in a tree."""

from quire.config.draft_tree import DraftTree
from quire.metrics.drafts import DraftCounts


def test_a_tree_counts_by_depth() -> None:
    counts = DraftCounts(DraftTree.read("[(0,), (1,), (0, 0), (1, 0)]"))
    counts.count(4, 2)
    counts.count(4, 0)
    counts.count(2, 1)
    stats = counts.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 10, 3)
    assert stats.num_accepted_tokens_per_pos == [2, 1]


def test_a_chain_counts_by_place() -> None:
    counts = DraftCounts()
    counts.count(3, 1)
    stats = counts.stats()
    assert stats.num_accepted_tokens_per_pos == [1, 0, 0]
