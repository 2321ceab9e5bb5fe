"""Trees of drafts that a head fills level by level, each node from what the head says of its parent.

Who runs the head (`quire.worker.eagle`) makes them for a step's sequences. Knows the shape and tokens, no tensors.
"""

from collections.abc import Sequence

from quire.config.draft_tree import DraftTree


class GrowingTree:
    """The first nodes of a tree.

    Args:
        num_nodes: how many are wanted, >= 1.

    Attributes:
        token_ids: of the nodes that have one.
        level: the nodes that the head is to be run on next; at first the newest token, which is -1.
    """

    def __init__(self, tree: DraftTree, num_nodes: int) -> None:
        self._tree, self._num_nodes = tree, num_nodes
        self.token_ids: list[int] = []
        self.level = range(-1, 0)

    @property
    def num_choices(self) -> int:
        """How many of the likeliest tokens are wanted of each node of the level."""
        return 1 + max(self._tree.choices[node] for above in self.level for node in self._tree.children[1 + above])

    def grow(self, ranked: Sequence[Sequence[int]]) -> list[int]:
        """Give tokens to the nodes below the level, which then are the level.

        Args:
            ranked: of each node of the level its likeliest tokens, best first. Where there are too few, the tree ends.

        Returns:
            For each node of the new level, its parent's place in the old one; [] where nothing is left to be done.
        """
        tree, start = self._tree, len(self.token_ids)
        end = tree.num_within(tree.depths[start])
        parents: list[int] = []
        for node in range(start, min(end, self._num_nodes)):
            place = tree.parents[node] - self.level.start
            if tree.choices[node] >= len(ranked[place]):
                return []
            parents.append(place)
            self.token_ids.append(ranked[place][tree.choices[node]])
        self.level = range(start, end)
        return parents if end < self._num_nodes else []


class GrowingTrees:
    """The first nodes of the same tree for several sequences, of each so many.

    Attributes:
        growing: the sequences whose levels the head is to be run on.
        depth: of those levels; 0 of the newest token.
    """

    def __init__(self, tree: DraftTree, nums: Sequence[int]) -> None:
        self._trees = [GrowingTree(tree, num) for num in nums]
        self.growing = list(range(len(nums)))
        self.depth = 0

    @property
    def levels(self) -> list[range]:
        """The nodes of each growing sequence that the head is to be run on next."""
        return [self._trees[i].level for i in self.growing]

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """Of each of these nodes, one level after another: whose it is, and how many likeliest tokens it is asked."""
        return [(i, self._trees[i].num_choices) for i in self.growing for _ in self._trees[i].level]

    def grow(self, ranked: Sequence[Sequence[int]], drawn: Sequence[int | None] = ()) -> list[int]:
        """From the tokens of all these nodes to the next levels; their parents' places, [] where all is done.

        `drawn`: of each node the token that the sampler would draw, where that may be another than the likeliest: it
        is the best choice then.
        """
        if drawn:
            ranked = [
                [best, *(token_id for token_id in tokens if token_id != best)] if best is not None else tokens
                for best, tokens in zip(drawn, ranked, strict=True)
            ]
        self.depth += 1
        parents: list[int] = []
        growing, self.growing, first = self.growing, [], 0
        for i in growing:
            end = first + len(self._trees[i].level)
            if above := self._trees[i].grow(ranked[first:end]):
                parents += [first + place for place in above]
                self.growing.append(i)
            first = end
        return parents

    def drafts(self, i: int) -> list[int]:
        """The tokens that a sequence has by now, in the order of nodes."""
        return self._trees[i].token_ids


def path_of(tree: DraftTree, drafts: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """The nodes, whose tokens are `drafts`, along which these tokens go; as far as they do."""
    path: list[int] = []
    place = 0
    for token_id in token_ids:
        fitting = [node for node in tree.children[place] if node < len(drafts) and drafts[node] == token_id]
        if not fitting:
            break
        path.append(fitting[0])
        place = 1 + fitting[0]
    return path
