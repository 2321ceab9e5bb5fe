"""Trees of drafts, under everything: tokens and logprobs are those of plain decoding, to the last bit.

The requests of the exactness matrix, greedy, seeded with penalties, forked and searched by beams, with a proposer that
knows the answers and puts each next token at a child of its own choice, or at none.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from test_exactness import SOME_MODELS, engine, requests, run

from quire.config.draft_tree import DraftTree
from quire.speculative.base import DraftedSequence, Proposer

TREES = {
    "bushy": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 0, 0, 0)]",
    "flat": "[(0,), (1,), (2,)]",
    "chain": "[(0,), (0, 0), (0, 0, 0)]",
}
WAYS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 24, "block_size": 8},
    "prefixes": {"enable_prefix_caching": True, "max_num_batched_tokens": 48, "block_size": 16},
    "preempted": {"num_kv_blocks": 8, "block_size": 16, "max_model_len": 128, "late": True},
    "swapped": {"num_kv_blocks": 8, "block_size": 16, "max_model_len": 128, "swap_space": 0.01},
    "wide blocks": {"block_size": 64, "late": True},
}


@pytest.fixture(scope="module")
def alone(model_options):
    """The answers without drafts, one after another; computed once per model and format."""
    known: dict[str, list[Any]] = {}

    def answers(model: str, dtype: str, **options: Any) -> list[Any]:
        key = str((model, dtype, options))
        if key not in known:
            one = engine(model_options(model), dtype, **options)
            known[key] = run(one, requests(one.config.model.vocab_size), together=1)
        return known[key]

    return answers


class TreeProposer(Proposer):
    """Drafts trees from recorded answers, by prompt; each level has the right token with probability `p`."""

    uses_hidden = True

    def __init__(self, tree: DraftTree, answers: dict[tuple[int, ...], list[int]], vocab_size: int, p: float) -> None:
        self.tree, self.max_drafts = tree, len(tree)
        self._answers, self._vocab_size, self._p = answers, vocab_size, p
        self._rng = random.Random(3)
        self.num_cut = 0

    def propose(self, rows: Sequence[DraftedSequence], hidden: Any) -> list[list[int]]:
        assert len(hidden) == len(rows)
        return [self._draft(row) for row in rows]

    def _draft(self, row: DraftedSequence) -> list[int]:
        tree, rng, tokens = self.tree, self._rng, row.tokens
        answer = self._answers.get(tuple(tokens.prompt()), [])[tokens.position :]
        drafts = [rng.randrange(self._vocab_size) for _ in range(len(tree))]
        place = 0  # on the right path: the newest token, or 1 + a node
        for token_id in answer:
            children = tree.children[place]
            if not children or rng.random() >= self._p:
                break
            node = rng.choice(children)
            for other in children:  # the first one that fits is followed
                if drafts[other] == token_id:
                    drafts[other] = (token_id + 1) % self._vocab_size
            drafts[node] = token_id
            place = 1 + node
        count = rng.choice([row.max_drafts, row.max_drafts, rng.randint(1, row.max_drafts)])
        self.num_cut += count < len(tree)
        return drafts[:count]


def check(model_options, alone, model: str, options: dict[str, Any], shape: str, way: str) -> None:
    dtype = options["dtype"]
    formats = {name: value for name, value in options.items() if name != "dtype"}
    expected = alone(model, dtype, **formats)
    tree = DraftTree.read(TREES[shape])
    vocab_size = engine(model_options(model), dtype, **formats).config.model.vocab_size
    todo = requests(vocab_size)
    answers = {tuple(prompt): rows[0][1] for (prompt, _), rows in zip(todo, expected, strict=True)}
    proposer = TreeProposer(tree, answers, vocab_size, 0.75)
    one = engine(model_options(model), dtype, proposer=proposer, tree=tree, **formats, **WAYS[way])
    assert run(one, todo, together=7) == expected
    if way == "prefixes":
        assert run(one, todo, together=32) == expected
    assert proposer.num_cut > 10
    stats = one.stats()
    assert stats.speculation is not None
    accepted = stats.speculation.num_accepted_tokens_per_pos
    assert len(accepted) == tree.max_depth
    assert sum(accepted) == stats.speculation.num_accepted_tokens > 50
    assert tree.max_depth == 1 or accepted[1] > 10, "no path was moved"
    if "num_kv_blocks" in WAYS[way]:
        assert stats.num_preemptions_total > 0, "nothing was preempted, so nothing was tested"


@pytest.mark.parametrize(
    ("model", "options", "way"),
    [("llama", {"dtype": "float32"}, "prefixes"), ("mistral", {"dtype": "bfloat16"}, "preempted")],
)
def test_trees_change_nothing(model_options, alone, model: str, options: dict[str, Any], way: str) -> None:
    check(model_options, alone, model, options, "bushy", way)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "shape", "way"),
    [
        ("gemma2", {"dtype": "float32", "kernels": "torch"}, "bushy", "preempted"),
        ("gemma3", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, "bushy", "swapped"),
        ("demo", {"dtype": "bfloat16", "quantization": "int8"}, "chain", "chunked"),
        ("qwen3", {"dtype": "bfloat16"}, "flat", "wide blocks"),
    ],
)
def test_trees_change_nothing_however_it_runs(
    model_options,
    alone,
    model: str,
    options: dict[str, Any],
    shape: str,
    way: str,
) -> None:
    check(model_options, alone, model, options, shape, way)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("model", SOME_MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("way", WAYS)
def test_tree_matrix(model_options, alone, model: str, dtype: str, shape: str, way: str) -> None:
    check(model_options, alone, model, {"dtype": dtype}, shape, way)
