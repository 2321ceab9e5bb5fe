"""Sequences that begin with the same blocks: keys are read once for all, and each row has the bits it has alone."""

import random
from typing import Any

import pytest
import torch
from paged import Sequence, alone, attend, attend_once, make_sequences, make_spec, poisoned_cache
from torch import Tensor

from quire.attention.base import AttentionBatch
from quire.attention.native import NativeBackend

# Prompts: how long each is, and the one that it begins with. Sequences: the prompt, and how many keys come after it.
PROMPTS: dict[str, tuple[int, str]] = {"": (0, ""), "a": (200, ""), "ab": (1090, "a"), "c": (150, "")}
STEP = [("ab", 3), ("", 70), ("a", 1), ("c", 40), ("ab", 90), ("a", 130), ("", 1), ("c", 1), ("a", 63)]


class Shared:
    """Sequences over one cache, of which prompts are computed once, and which then compute a token each in one step."""

    def __init__(self, backend: NativeBackend, dtype: torch.dtype, block_size: int, heads: tuple[int, int]) -> None:
        self.backend, self.size, self.heads = backend, block_size, heads
        self.whole = make_sequences([PROMPTS[name][0] + own for name, own in STEP], heads, 40, dtype)
        for sequence, (name, _) in zip(self.whole, STEP, strict=True):
            sequence.query *= 20  # large scores: their rounding shows in the weights
            while name:
                length, before = PROMPTS[name]
                [prompt] = make_sequences([length], heads, 40, dtype, seed=len(name) + ord(name[-1]))
                for part, common in zip(vars(sequence).values(), vars(prompt).values(), strict=True):
                    part[PROMPTS[before][0] : length] = common[PROMPTS[before][0] :]
                name = before
        self.tables = self._tables()
        self.cache = poisoned_cache(backend, int(self.tables.max()) + 2, block_size, (heads[1], 40), dtype)

    def _tables(self) -> Tensor:
        """Blocks in no order, those of a prompt that it fills the same for all that begin with it."""
        free = list(range(1, 4000))
        random.Random(0).shuffle(free)
        tables = torch.zeros(len(STEP), -(-max(map(len, self.whole)) // self.size), dtype=torch.int32)
        known: dict[tuple[str, int], int] = {}
        for row, (sequence, (name, _)) in enumerate(zip(self.whole, STEP, strict=True)):
            for block in range(-(-len(sequence) // self.size)):
                owner, end = name, (block + 1) * self.size
                while owner and PROMPTS[PROMPTS[owner][1]][0] >= end:
                    owner = PROMPTS[owner][1]
                key = (owner, block) if owner and PROMPTS[owner][0] >= end else (str(row), block)
                tables[row, block] = known.setdefault(key, free.pop())
        return tables

    def step(self, order: list[int], first: list[int], counts: list[int], options: dict[str, Any]) -> list[Tensor]:
        rows = torch.tensor([0, *counts]).cumsum(0)
        spans = [range(at, at + count) for at, count in zip(first, counts, strict=True)]
        slots = [
            int(self.tables[s, p // self.size]) * self.size + p % self.size
            for s, span in zip(order, spans, strict=True)
            for p in span
        ]
        lengths = torch.tensor([span.stop for span in spans], dtype=torch.int32)
        tables = self.tables[order, : -(-int(lengths.max()) // self.size)].contiguous()
        batch = AttentionBatch(rows.int(), lengths, tables, torch.tensor(slots, dtype=torch.int32), self.size)
        given = (
            torch.cat(
                [getattr(self.whole[s], name)[span.start : span.stop] for s, span in zip(order, spans, strict=True)]
            )
            for name in ("query", "key", "value")
        )
        spec = make_spec(self.whole[0], **options)
        out = attend_once(self.backend, Sequence(*given), spec, self.cache, self.backend.build(batch))
        return list(out.split(counts))


@pytest.mark.sweep
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "heads"), [(32, (4, 2)), (32, (16, 8)), (16, (6, 6)), (5, (4, 1))])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"window": 200}], ids=["plain", "softcap", "window"])
def test_rows_have_the_bits_that_they_have_alone(
    int8: bool, dtype: torch.dtype, block_size: int, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    backend = NativeBackend(int8)
    run = Shared(backend, dtype, block_size, heads)
    expected = [attend(backend, [whole], alone([whole], 1000), 16, **options)[0] for whole in run.whole]
    for s, whole in enumerate(run.whole):
        if len(whole) > 1:
            run.step([s], [0], [len(whole) - 1], options)
    newest = [len(whole) - 1 for whole in run.whole]
    for num_threads, order in ((1, list(range(len(STEP)))), (2, random.Random(1).sample(range(len(STEP)), len(STEP)))):
        torch.set_num_threads(num_threads)
        for s, found in zip(order, run.step(order, [newest[s] for s in order], [1] * len(order), options), strict=True):
            assert torch.equal(found, expected[s][-1:]), (num_threads, s)
    # One of them computes many tokens again beside the others.
    counts = [1] * len(STEP)
    counts[4] = 40
    first = [place + 1 - count for place, count in zip(newest, counts, strict=True)]
    for s, found in enumerate(run.step(list(range(len(STEP))), first, counts, options)):
        assert torch.equal(found, expected[s][-counts[s] :]), s
