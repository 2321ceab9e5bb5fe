"""The shape of a tree of drafts: read, put in order, refused by name."""

import pytest

from quire.config.draft_tree import DraftTree
from quire.errors import ConfigError


def test_nodes_come_by_depth_and_then_by_choice() -> None:
    tree = DraftTree.read("[(1,), (0, 0), (0,), (0, 2), (1, 0), (0, 2, 5)]")
    assert tree.paths == ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 5))
    assert tree.parents == (-1, -1, 0, 0, 1, 3)
    assert tree.depths == (1, 1, 2, 2, 2, 3)
    assert tree.choices == (0, 1, 0, 2, 0, 5)
    assert tree.children == ((0, 1), (2, 3), (4,), (), (5,), (), ())
    assert (len(tree), tree.max_depth) == (6, 3)
    assert [tree.num_within(depth) for depth in (-1, 0, 1, 2, 3, 9)] == [0, 0, 2, 5, 6, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be the text of a list of tuples"),
        ("[]", "must be the text of a list of tuples"),
        ("5", "must be the text of a list of tuples"),
        ("[(0,), ()]", "must be the text of a list of tuples"),
        ("[(0,), (-1,)]", "each 0 or more"),
        ("[(0,), (True,)]", "each 0 or more"),
        ("[(0,), ('a',)]", "each 0 or more"),
        ("[(0)]", "must be the text of a list of tuples"),
        ("__import__('os')", "must be the text of a list of tuples"),
        ("(" * 500, "must be the text of a list of tuples"),
        ("[(0,), (1, 0)]", "the node (1, 0) without its parent (1,); add that"),
        ("[(0,), (0, 1), (0,)]", "the node (0,) twice"),
        (str([(i,) for i in range(65)]), "65 nodes, and 64 are allowed"),
    ],
)
def test_no_tree(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DraftTree.read(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("speculative_token_tree")
