"""Paths of a tree of drafts, node by node."""

from quire.config.draft_tree import DraftTree


def paths_of(tree: DraftTree) -> list[list[int]]:
    """Of each node, those on the way to it, the topmost first, and itself."""
    found: list[list[int]] = []
    for node, parent in enumerate(tree.parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found
