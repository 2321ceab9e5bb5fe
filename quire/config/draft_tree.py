"""The shape of a tree of drafts, as `speculative_token_tree` says it.

Proposers fill it with tokens, the scheduler counts its levels, and workers verify it. A node is a path of choices from
the newest token: (0,) is the best next token, (1,) the second best, (0, 2) the third best after the best. It knows no
tokens.
"""

import ast
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.errors import ConfigError

MAX_NODES = 64
_Paths = Annotated[list[Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]], Meta(min_length=1)]


@dataclass(frozen=True)
class DraftTree:
    """Nodes in order of depth, and of choices within one: parents come first, and any first few nodes are a tree, too.

    Attributes:
        paths: each node's choices from the newest token on.
    """

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, text: str) -> "DraftTree":
        """A tree from the text of a list of tuples, in any order.

        Raises:
            ConfigError: it is none, or has a node without its parent, twice the same, or too many of them.
        """
        name = "speculative_token_tree"
        try:
            given = msgspec.convert(ast.literal_eval(text), _Paths)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            raise ConfigError(
                f"{name} must be the text of a list of tuples of choices, each 0 or more, as '[(0,), (1,), (0, 0)]'; "
                f"got {text[:80]!r}."
            ) from None
        paths = sorted(given, key=lambda path: (len(path), path))
        if len(paths) > MAX_NODES:
            raise ConfigError(f"{name} has {len(paths)} nodes, and {MAX_NODES} are allowed; leave some out.")
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ConfigError(f"{name} has the node {twice[0]} twice; leave one out.")
        for path in paths:
            if len(path) > 1 and path[:-1] not in paths:
                raise ConfigError(f"{name} has the node {path} without its parent {path[:-1]}; add that.")
        return cls(tuple(paths))

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Of each node, the number of its parent; -1: the newest token."""
        places = {path: place for place, path in enumerate(self.paths)}
        return tuple(places.get(path[:-1], -1) for path in self.paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How far each node lies beyond the newest token, >= 1."""
        return tuple(len(path) for path in self.paths)

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """Which of its parent's likeliest tokens each node stands for, 0 the best."""
        return tuple(path[-1] for path in self.paths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """[1 + nodes]: the children of the newest token first, and then of each node."""
        found: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return tuple(tuple(nodes) for nodes in found)

    @property
    def max_depth(self) -> int:
        """Most drafts that can be accepted."""
        return self.depths[-1]

    def num_within(self, depth: int) -> int:
        """How many nodes lie no deeper; they are the first ones."""
        return bisect_right(self.depths, depth)
