"""Trees of drafts, filled level by level, and the paths that tokens take through them."""

from quire.config.draft_tree import DraftTree
from quire.models.growing_tree import GrowingTree, GrowingTrees, path_of

TREE = DraftTree.read("[(0,), (1,), (3,), (0, 0), (1, 0), (1, 2), (1, 2, 0)]")


def test_each_node_gets_the_choice_of_its_parent() -> None:
    tree = GrowingTree(TREE, len(TREE))
    assert (list(tree.level), tree.num_choices) == ([-1], 4)
    assert tree.grow([(10, 11, 12, 13)]) == [0, 0, 0]
    assert tree.token_ids == [10, 11, 13]
    assert (list(tree.level), tree.num_choices) == ([0, 1, 2], 3)
    assert tree.grow([(20, 21, 22), (30, 31, 32), (40, 41, 42)]) == [0, 1, 1]
    assert list(tree.level) == [3, 4, 5]
    assert tree.grow([(50,), (60,), (70,)]) == []
    assert tree.token_ids == [10, 11, 13, 20, 30, 32, 70]


def test_it_ends_with_the_nodes_that_are_wanted_or_the_tokens_there_are() -> None:
    tree = GrowingTree(TREE, 4)
    assert tree.grow([(10, 11, 12, 13)]) == [0, 0, 0]
    assert tree.grow([(20,), (), ()]) == []
    assert tree.token_ids == [10, 11, 13, 20]
    for num_nodes in (2, 3):
        tree = GrowingTree(TREE, num_nodes)
        assert tree.grow([(10, 11, 12, 13)]) == []
        assert tree.token_ids == [10, 11, 13][:num_nodes]
    tree = GrowingTree(TREE, len(TREE))
    assert tree.grow([(10, 11)]) == []
    assert tree.token_ids == [10, 11]


def test_several_grow_as_far_as_each_shall() -> None:
    trees = GrowingTrees(TREE, [4, 2, 7])
    assert trees.wanted == [(0, 4), (1, 4), (2, 4)]
    ranked = [(10, 11, 12, 13), (20, 21, 22, 23), (30, 31, 32, 33)]
    assert trees.grow(ranked) == [0, 0, 0, 2, 2, 2]
    assert (trees.growing, trees.levels) == ([0, 2], [range(3), range(3)])
    assert trees.wanted == [(0, 3)] * 3 + [(2, 3)] * 3
    assert trees.grow([(40, 41, 42)] * 3 + [(50, 51, 52), (60, 61, 62), (70, 71, 72)]) == [3, 4, 4]
    assert trees.grow([(80,), (90,), (99,)]) == []
    assert [trees.drafts(i) for i in range(3)] == [[10, 11, 13, 40], [20, 21], [30, 31, 33, 50, 60, 62, 99]]


def test_what_the_sampler_would_draw_is_the_best_choice() -> None:
    trees = GrowingTrees(TREE, [5, 3, 3])
    trees.grow([(10, 11, 12, 13), (20, 21, 22, 23), (30, 31, 32, 33)], [12, 99, None])
    assert [trees.drafts(i) for i in range(3)] == [[12, 10, 13], [99, 20, 22], [30, 31, 33]]
    assert trees.depth == 1


def test_a_path_goes_as_far_as_tokens_and_nodes_agree() -> None:
    drafts = [10, 11, 13, 20, 30, 32, 70]
    assert path_of(TREE, drafts, [11, 32, 70]) == [1, 5, 6]
    assert path_of(TREE, drafts[:6], [11, 32, 70]) == [1, 5]
    assert path_of(TREE, drafts, [13, 30]) == [2]
    assert path_of(TREE, drafts, []) == []
