"""What a sequence draws in a step: a token from a row of logits, or several, and further ones where it has drafts.

The model runner makes lanes, and the sampler fills them in. They know rows of logits, and no plan.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from quire.config.draft_tree import DraftTree
from quire.protocol.step import Failure, TokenLogprobs
from quire.sampling.state import Mask, SamplingState


class Draw(Struct, eq=False):
    """What is to be drawn for one sequence.

    Attributes:
        row: of the logits.
        num_samples: tokens; sample j is drawn as sequence `sequence_index` + j would.
        mask: a grammar's, where there is one.
        ahead: positions after the sequence's next one that it is drawn for; then nothing may look back.
    """

    state: SamplingState
    row: int
    num_samples: int = 1
    mask: Mask | None = None
    ahead: int = 0


class Lane(Draw, eq=False):
    """One sequence of a step: what it draws at its first position, and at the others as it goes on, and what it drew.

    Several samples there are only without drafts; the first of them is appended.

    Attributes:
        num_drafts: how many of the drafts in its row were computed.
        place: among the computed of what is drawn next; its row of the logits is as far from the first.
        masks: a grammar's bitmask by sampled position, where there is one.
        tree: the shape of the drafts, where they are no chain: `masks` are then by place among the computed, as is
        path: the place of what each token was drawn from, 0 and then 1 + its node.
        draft_ids: those of the tree.
        drafted: the proposer's view of the sequence where a rule judges its drafts (`quire.sampling.accept`), not
            whether the sampler draws them.
        probs: then float64 [V], what each draft in its row was drawn from; [] where they are certain.
        token_ids: what was appended, or the samples.
        logprobs: one for each of them, where asked for.
        failure: why there is no token.
    """

    num_drafts: int = 0
    place: int = 0
    masks: dict[int, Mask] | None = None
    tree: DraftTree | None = None
    path: Sequence[int] = ()
    draft_ids: Sequence[int] = ()
    drafted: Any = None
    probs: list[Any] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    failure: Failure | None = None

    @property
    def first_row(self) -> int:
        """Row of the logits of its first position; those of its drafts follow."""
        return self.row - self.place

    @property
    def num_refused(self) -> int:
        """Drafts that were computed in vain."""
        return self.num_drafts + 1 - len(self.token_ids) if self.num_drafts else 0

    @property
    def max_accepted(self) -> int:
        """Most of its drafts that can be accepted."""
        return self.num_drafts if self.tree is None else self.tree.depths[self.num_drafts - 1]

    def go_to(self, place: int) -> None:
        """Draw at this position, or place in the tree, next."""
        self.row, self.place = self.first_row + place, place
        self.mask = self.masks.get(place) if self.masks else None

    def use_tree(self, tree: DraftTree) -> None:
        """Its drafts are the first nodes of a tree."""
        tokens = self.state.tokens
        self.tree, self.path = tree, [0]
        self.draft_ids = tokens.ids[tokens.num : tokens.num + self.num_drafts].tolist()

    @property
    def last_row(self) -> int:
        """The row of the logits that the newest token was drawn from."""
        return self.first_row + (len(self.token_ids) - 1 if self.tree is None else self.path[-1])

    @property
    def moves(self) -> list[tuple[int, int]]:
        """Of a tree's accepted drafts, those that would lie elsewhere in a chain: the node, and its place there."""
        return [(at - 1, i) for i, at in enumerate(self.path[1:]) if at - 1 != i]

    def follow(self, token_id: int) -> bool:
        """Whether a token that was drawn is the draft after those before it; of a tree, go on to its node."""
        if self.tree is None:
            return bool(self.state.tokens.ids[self.state.tokens.num] == token_id)
        for node in self.tree.children[self.path[-1]]:
            if node < self.num_drafts and self.draft_ids[node] == token_id:
                self.path = [*self.path, 1 + node]
                return True
        return False
