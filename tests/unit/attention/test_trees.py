"""Trees of drafts in attention: each node has the bits of a chain of its ancestors, and moved tokens are themselves."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from paged import Sequence, alone, attend, attend_once, make_sequences, make_spec, poisoned_cache
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch, SlotMoves, Tails
from quire.attention.registry import select_backend
from quire.config.draft_tree import DraftTree
from quire.ops.native.library import TORCH, levels
from tests.paths import paths_of

NEVER = 2**31 - 1
TREES = [
    "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 0, 0, 0)]",
    "[(0,), (1,), (2,), (3,)]",
    "[(0,), (0, 0), (0, 0, 0)]",
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 7},
    {"window": 65, "softcap": 3.0},
    {"sinks": torch.tensor([0.5, -2.0, 3.0, 1.0]), "window": 2},
]


@pytest.fixture(
    params=["reference", *(f"{kind}/{name}" for name in levels() if name != TORCH for kind in ("model", "int8"))]
)
def any_backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """The reference, and the native backend on each level of kernels, with the model's type and with int8."""
    if request.param == "reference":
        yield select_backend("reference")
        return
    kind, level = request.param.split("/")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_KERNELS", level)
        yield select_backend("native-int8" if kind == "int8" else "native")


class Verified:
    """Sequences whose prompts are computed, each with a tree of drafts that is then computed in one step."""

    def __init__(
        self, backend: AttentionBackend, tree: DraftTree, lengths: list[int], dtype: torch.dtype, block_size: int
    ) -> None:
        self.backend, self.tree, self.dtype, self.size = backend, tree, dtype, block_size
        # Of each sequence: the prompt, its newest token, the nodes, and what is to come after them.
        self.tokens = make_sequences([n + 1 + len(tree) + 1 for n in lengths], (4, 2), 40, dtype, seed=block_size)
        for sequence in self.tokens:
            sequence.query *= 20  # large scores: their rounding shows in the weights
        self.lengths = lengths
        self.together = True
        blocks = [-(-len(sequence) // block_size) for sequence in self.tokens]
        free = list(range(1, sum(blocks) + 2))
        random.Random(0).shuffle(free)
        self.table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for s, count in enumerate(blocks):
            self.table[s, :count] = torch.tensor([free.pop() for _ in range(count)])
        self.cache = poisoned_cache(backend, sum(blocks) + 2, block_size, (2, 40), dtype)

    def slots(self, s: int, positions: list[int]) -> list[int]:
        return [int(self.table[s, p // self.size]) * self.size + p % self.size for p in positions]

    def step(self, parts: list[tuple[int, list[int], int, list[int]]], options: dict[str, Any]) -> list[Tensor]:
        """Sequences of attention: (whose, tokens computed, seq_len, slots of its tail)."""
        rows = torch.tensor([0] + [len(part[1]) for part in parts]).cumsum(0)
        slots = [slot for s, places, *_ in parts for slot in self.slots(s, places)]
        width = max(len(part[3]) for part in parts)
        tails = None
        if width:
            padded = [part[3] + [0] * (width - len(part[3])) for part in parts]
            starts = [length - len(tail) if tail or self.together else NEVER for _, _, length, tail in parts]
            counts = [1] * len(parts)
            if self.together:
                counts = [(1 + len(self.tree)) * (i % (1 + len(self.tree)) == 0) for i in range(len(parts))]
            tails = Tails(*(torch.tensor(x, dtype=torch.int32) for x in (starts, counts, padded)))
        tables = self.table[[part[0] for part in parts]].contiguous()
        lengths = torch.tensor([part[2] for part in parts], dtype=torch.int32)
        batch = AttentionBatch(rows.int(), lengths, tables, torch.tensor(slots, dtype=torch.int32), self.size, tails)
        given = (
            torch.cat([getattr(self.tokens[s], name)[places] for s, places, *_ in parts])
            for name in ("query", "key", "value")
        )
        spec = make_spec(self.tokens[0], **options)
        out = attend_once(self.backend, Sequence(*given), spec, self.cache, self.backend.build(batch))
        return [out[int(low) : int(high)] for low, high in zip(rows, rows[1:], strict=False)]

    def prefill(self, options: dict[str, Any]) -> None:
        self.step([(s, list(range(n)), n, []) for s, n in enumerate(self.lengths) if n], options)

    def verify(self, options: dict[str, Any]) -> list[list[Tensor]]:
        """Of each sequence, what its newest token and every node attend to."""
        parts: list[tuple[int, list[int], int, list[int]]] = []
        for s, n in enumerate(self.lengths):
            parts.append((s, [n], n + 1, []))
            for node, path in enumerate(paths_of(self.tree)):
                tail = self.slots(s, [n + 1 + ancestor for ancestor in path])
                parts.append((s, [n + 1 + node], n + 1 + len(path), tail))
        found, each = self.step(parts, options), 1 + len(self.tree)
        return [found[s * each : (s + 1) * each] for s in range(len(self.lengths))]

    def chain(self, s: int, places: list[int], options: dict[str, Any]) -> Tensor:
        """The same tokens as a sequence of their own."""
        one = Sequence(*(getattr(self.tokens[s], name)[places] for name in ("query", "key", "value")))
        return attend(self.backend, [one], alone([one], 1000), 16, **options)[0]


@pytest.mark.sweep
@pytest.mark.parametrize("text", TREES, ids=["bushy", "flat", "chain"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [5, 32])
@pytest.mark.parametrize("together", [True, False])
def test_a_node_has_the_bits_of_a_chain(
    any_backend: AttentionBackend,
    text: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    block_size: int,
    together: bool,
) -> None:
    tree = DraftTree.read(text)
    run = Verified(any_backend, tree, [0, 30, 62, 130], dtype, block_size)
    run.together = together
    run.prefill(options)
    for s, found in enumerate(run.verify(options)):
        n = run.lengths[s]
        prompt = list(range(n + 1))
        assert torch.equal(found[0], run.chain(s, prompt, options)[-1:])
        for node, path in enumerate(paths_of(tree)):
            expected = run.chain(s, [*prompt, *(n + 1 + ancestor for ancestor in path)], options)
            assert torch.equal(found[1 + node], expected[-1:]), (s, node)


@pytest.mark.pairs
@pytest.mark.parametrize("options", OPTIONS[:2], ids=["plain", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [5, 32])
def test_an_accepted_path_that_was_moved_is_a_chain(
    any_backend: AttentionBackend, options: dict[str, Any], dtype: torch.dtype, block_size: int
) -> None:
    tree = DraftTree.read(TREES[0])
    run = Verified(any_backend, tree, [0, 30, 60, 130], dtype, block_size)
    run.prefill(options)
    run.verify(options)
    accepted = [(), (0,), (1, 4), (0, 3, 7)]
    sources: list[int] = []
    destinations: list[int] = []
    for s, path in enumerate(accepted):
        first = run.lengths[s] + 1
        sources += run.slots(s, [first + node for node in path])
        destinations += run.slots(s, [first + j for j in range(len(path))])
    any_backend.move_slots(
        run.cache,
        SlotMoves(torch.tensor(sources).int(), torch.tensor(destinations).int(), block_size, dtype),
    )
    for s, path in enumerate(accepted):
        first = run.lengths[s] + 1
        last = first + len(tree)  # the token drawn at the accepted leaf
        position = first + len(path)
        # At its place in the cache, so by its own slot and not by its number among the tokens.
        run.tokens[s].key[position], run.tokens[s].value[position] = run.tokens[s].key[last], run.tokens[s].value[last]
        run.tokens[s].query[position] = run.tokens[s].query[last]
        [found] = run.step([(s, [position], position + 1, [])], options)
        fresh = Verified(any_backend, tree, run.lengths, dtype, block_size)
        expected = fresh.chain(s, [*range(first), *(first + node for node in path), last], options)
        assert torch.equal(found, expected[-1:]), s
