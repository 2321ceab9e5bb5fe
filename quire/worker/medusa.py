"""Drafts by Medusa heads: a token each from the hidden state that the newest token was drawn from.

Heads see no drafts, so that all of a step's come from one product a head, for all sequences at once; those without an
output head of their own use the model's. Tokens are drawn as the sampler will draw (`quire.worker.drafting`). The
worker makes one where the configuration says so. It knows rows, and no plan.
"""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

from torch import Tensor

from quire.config.speculative import SpeculativeConfig
from quire.config.worker import WorkerConfig
from quire.models.causal_lm import CausalLM, RunnableModel
from quire.models.heads import fill_heads, open_heads
from quire.models.medusa import MedusaHeads, MedusaLogits, read_heads, read_token_map
from quire.ops.native.library import Target
from quire.sampling.waves import sample_ahead
from quire.speculative.base import DraftedSequence, Proposer
from quire.worker.devices.base import Device
from quire.worker.drafting import Drafter, drafting_state, rank_tokens
from quire.worker.rows import RowTable

# Heads know less than the model, and what they spread over many tokens is seldom drawn: at half the temperature half as
# many drafts again are accepted, of those of the demo's heads.
_SHARPNESS = 2.0


class MedusaModel(Drafter):
    """The heads of a configuration that names some; `load` fills them.

    Raises:
        ModelLoadError: files are missing or damaged, or the heads are another model's, or too few.
    """

    reads = False  # drafts follow from the hidden state alone
    timed_sizes = 1, 8  # each is as many rows as there are heads

    def __init__(self, config: WorkerConfig, speculative: SpeculativeConfig, device: Device, model: CausalLM) -> None:
        assert config.heads is not None, "no heads are configured"
        self._config, self._speculative, self.device = config, speculative, device
        self._checkpoint = open_heads(config.heads, speculative.model or "", load_format=config.load_format)
        tree = speculative.tree
        num_heads = speculative.num_speculative_tokens if tree is None else tree.max_depth
        shape, self._names = read_heads(self._checkpoint, config.model, num_heads)
        builder = self.builder(speculative, model)
        self.module = self._heads = device.place(lambda: MedusaHeads(shape, builder))

    def load(self, progress: bool) -> None:
        heads, checkpoint, model = self._heads, self._checkpoint, self._config.model
        fill_heads(heads, checkpoint, self._names, heads.dtype, model.seed)
        self._token_map = read_token_map(checkpoint, heads.shape, model.vocab_size)

    def proposer(self, model: RunnableModel, table: RowTable, caches: list[Tensor]) -> Proposer:
        self.timed = logits = MedusaLogits(self._heads, model, self._token_map, self.device.compile_heads)
        return MedusaProposer(self._speculative, logits.first, self.device.target)


class MedusaProposer(Proposer):
    """Drafts a chain, of each head the token that the sampler would draw, or a tree, of each head the likeliest ones.

    Args:
        config: the method's options. There are as many heads as drafts, or as the tree is deep.
        logits: what the first heads make of hidden states: [R, H] -> [R * num_heads, V], one row's after another's.
        target: where tokens are drawn from them.
    """

    uses_hidden = True

    def __init__(
        self, config: SpeculativeConfig, logits: Callable[[Tensor, int], Tensor], target: Target | None
    ) -> None:
        self.max_drafts, self._tree = config.max_drafts, config.tree
        # Of each draft, its head, and which of that one's likeliest tokens it is.
        self._nodes = [(head, 0) for head in range(config.max_drafts)]
        if (tree := config.tree) is not None:
            self._nodes = [(depth - 1, choice) for depth, choice in zip(tree.depths, tree.choices, strict=True)]
        self._logits, self._target = logits, target
        self._sharpness = math.inf if config.acceptance == "typical" else _SHARPNESS

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        nodes = self._nodes[: max(row.max_drafts for row in rows)]
        num_heads = nodes[-1][0] + 1
        states = [drafting_state(row, self._sharpness) for row in rows for _ in range(num_heads)]
        logits = self._logits(hidden, num_heads)
        if self._tree is not None:
            ranked = rank_tokens(self._target, logits, states, [1 + max(choice for _, choice in nodes)] * len(states))
        else:
            drawn = sample_ahead(logits, states, [*range(num_heads)] * len(rows), self._target)
            ranked = [[] if token_id is None else [token_id] for token_id in drawn]
        drafts: list[list[int]] = []
        for place, row in enumerate(rows):
            # What a head says of a place doesn't depend on the node above it; where one has no more, the drafts end.
            found = ranked[place * num_heads : (place + 1) * num_heads]
            there = takewhile(lambda node, found=found: node[1] < len(found[node[0]]), nodes[: row.max_drafts])
            drafts.append([found[head][choice] for head, choice in there])
        return drafts
