"""The reference attention backend: right against dense attention in fp64, and bit-exact however a step is composed."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire.attention.backend import AttentionBatch
from quire.attention.reference import ReferenceBackend
from quire.attention.registry import select_backend
from quire.errors import ConfigError

BACKEND = ReferenceBackend()


@dataclass
class Sequence:
    """All that a sequence will ever be: query [L, Hq, D], key and value [L, Hkv, D]."""

    query: Tensor
    key: Tensor
    value: Tensor

    def __len__(self) -> int:
        return len(self.query)


def make_sequences(
    lengths: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, num_heads: int) -> Tensor:
        return torch.randn(length, num_heads, head_dim, generator=generator).to(dtype)

    return [Sequence(draw(n, heads[0]), draw(n, heads[1]), draw(n, heads[1])) for n in lengths]


def dense(sequence: Sequence, scale: float, window: int | None) -> Tensor:
    """Causal attention in fp64, written down directly."""
    query, key, value = (x.double().transpose(0, 1) for x in (sequence.query, sequence.key, sequence.value))
    group = len(query) // len(key)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    distance = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)


def attend(
    sequences: list[Sequence], steps: list[list[int]], block_size: int, window: int | None = None, seed: int = 0
) -> list[Tensor]:
    """Run sequences through the paged backend; steps[i][s] is the number of tokens of sequence s in step i.

    Blocks are scattered, and hold NaN until they are written, as do those of nobody.
    """
    _, num_kv_heads, head_dim = sequences[0].key.shape
    num_blocks = [-(-len(s) // block_size) for s in sequences]
    free = list(range(1, sum(num_blocks) + 3))
    random.Random(seed).shuffle(free)
    table = torch.zeros(len(sequences), max(num_blocks), dtype=torch.int64)
    for s, count in enumerate(num_blocks):
        table[s, :count] = torch.tensor([free.pop() for _ in range(count)])
    shape = BACKEND.kv_cache_shape(sum(num_blocks) + 3, block_size, num_kv_heads, head_dim)
    cache = torch.full(shape, torch.nan, dtype=sequences[0].key.dtype)
    computed = [0] * len(sequences)
    found: list[list[Tensor]] = [[] for _ in sequences]
    for step in steps:
        live = [s for s, count in enumerate(step) if count]
        spans = [(s, computed[s], computed[s] + step[s]) for s in live]
        rows = torch.tensor([0] + [high - low for _, low, high in spans]).cumsum(0)
        slots = [table[s, p // block_size] * block_size + p % block_size for s, a, b in spans for p in range(a, b)]
        lengths = torch.tensor([high for _, _, high in spans])
        width = -(-int(lengths.max()) // block_size)
        batch = AttentionBatch(rows, lengths, table[live, :width], torch.stack(slots), block_size)
        metadata = BACKEND.build(batch)
        query, key, value = (
            torch.cat([getattr(sequences[s], name)[a:b] for s, a, b in spans]) for name in ("query", "key", "value")
        )
        BACKEND.write_kv(key, value, cache, metadata)
        out = BACKEND.forward(query, cache, metadata, head_dim**-0.5, window)
        for i, (s, _, high) in enumerate(spans):
            found[s].append(out[rows[i] : rows[i + 1]])
            computed[s] = high
    assert computed == [len(s) for s in sequences]
    return [torch.cat(parts) for parts in found]


def whole(sequences: list[Sequence]) -> list[list[int]]:
    return [[len(s) for s in sequences]]


def alone(sequences: list[Sequence], chunk: int) -> list[list[int]]:
    """One sequence after another, in chunks."""
    steps = []
    for s, sequence in enumerate(sequences):
        for start in range(0, len(sequence), chunk):
            steps.append([min(chunk, len(sequence) - start) if i == s else 0 for i in range(len(sequences))])
    return steps


def mixed(sequences: list[Sequence], seed: int) -> list[list[int]]:
    """Steps in which each sequence decodes, computes a chunk, or rests."""
    rng = random.Random(seed)
    left = [len(s) for s in sequences]
    steps = []
    while any(left):
        step = [min(n, rng.choice([0, 1, 1, 5, 16, 90])) for n in left]
        if any(step):
            steps.append(step)
            left = [n - count for n, count in zip(left, step, strict=True)]
    return steps


HEADS = [(4, 4), (4, 2), (6, 1), (7, 1), (24, 1), (14, 2)]


@pytest.mark.parametrize(("heads", "window"), [*((h, None) for h in HEADS), *(((4, 2), w) for w in (1, 20, 64, 100))])
def test_equals_dense_attention(heads: tuple[int, int], window: int | None) -> None:
    sequences = make_sequences([1, 63, 64, 65, 150], heads, 8)
    for steps in (whole(sequences), mixed(sequences, 1)):
        for sequence, out in zip(sequences, attend(sequences, steps, 16, window), strict=True):
            torch.testing.assert_close(out.double(), dense(sequence, 8**-0.5, window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    sequences = make_sequences([70, 5], (4, 2), head_dim, dtype)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    found = attend(sequences, whole(sequences), 16)
    for sequence, out in zip(sequences, found, strict=True):
        assert out.dtype == dtype
        expected = dense(sequence, head_dim**-0.5, None)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    for one, two in zip(found, attend(sequences, alone(sequences, 3), 8), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "window"), [((4, 4), None), ((4, 2), None), ((7, 1), None), ((4, 2), 30)])
def test_bits_do_not_depend_on_composition(dtype: torch.dtype, window: int | None, heads: tuple[int, int]) -> None:
    sequences = make_sequences([3, 64, 150, 40], heads, 16, dtype)
    expected = attend(sequences, alone(sequences, 1), 16, window)
    variants = {
        "whole": (whole(sequences), 16),
        "alone whole": (alone(sequences, 1000), 16),
        "chunks of 7": (alone(sequences, 7), 8),
        "chunks of 64": (alone(sequences, 64), 64),
        "mixed": (mixed(sequences, 2), 1),
        "mixed again": (mixed(sequences, 3), 5),
    }
    for name, (steps, block_size) in variants.items():
        found = attend(sequences, steps, block_size, window, seed=len(name))
        for one, two in zip(expected, found, strict=True):
            assert torch.equal(one, two), name


def test_large_groups_are_cut_and_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = make_sequences([180, 150, 40, 9], (4, 2), 8)
    expected = attend(sequences, mixed(sequences, 4), 16)
    monkeypatch.setattr("quire.attention.reference.MAX_TILE_FLOATS", 1 << 12)
    for one, two in zip(expected, attend(sequences, mixed(sequences, 4), 16), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(expected, attend(sequences, whole(sequences), 16), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_blocks_that_left_the_window_are_never_read(chunk: int) -> None:
    """A manager may free them: they are poisoned before each step."""
    window, size = 20, 8
    [sequence] = make_sequences([120], (4, 2), 8)
    [expected] = attend([sequence], [[120]], 16, window)
    cache = torch.full(BACKEND.kv_cache_shape(15, size, 2, 8), torch.nan)
    for start in range(0, 120, chunk):
        stop = min(start + chunk, 120)
        BACKEND.fill_blocks(cache, torch.arange(max(0, start - window + 1) // size), float("nan"))
        rows = torch.tensor([0, stop - start])
        slots = torch.arange(start, stop)
        metadata = BACKEND.build(AttentionBatch(rows, rows[1:] + start, torch.arange(15)[None], slots, size))
        BACKEND.write_kv(sequence.key[start:stop], sequence.value[start:stop], cache, metadata)
        out = BACKEND.forward(sequence.query[start:stop], cache, metadata, 8**-0.5, window)
        assert torch.equal(out, expected[start:stop])


def test_work_is_cut_once_for_all_layers_of_a_kind() -> None:
    sequences = make_sequences([20], (4, 2), 8)
    batch = AttentionBatch(torch.tensor([0, 20]), torch.tensor([20]), torch.tensor([[0]]), torch.arange(20), 32)
    metadata = BACKEND.build(batch)
    cache = torch.zeros(BACKEND.kv_cache_shape(1, 32, 2, 8))
    for window in (None, None, 4, 4):
        BACKEND.forward(sequences[0].query, cache, metadata, 1.0, window)
    assert len(metadata._work) == 2


def test_copy_blocks_reads_before_it_writes() -> None:
    cache = torch.arange(4.0).view(4, 1, 1, 1, 1).repeat(1, 2, 2, 1, 3)
    BACKEND.copy_blocks(cache, torch.tensor([0, 1]), torch.tensor([1, 3]))
    assert cache[:, 0, 0, 0, 0].tolist() == [0, 0, 2, 1]
    BACKEND.fill_blocks(cache, torch.tensor([2]), float("nan"))
    assert cache[2].isnan().all()
    assert not cache[[0, 1, 3]].isnan().any()


def test_registry() -> None:
    assert isinstance(select_backend(), ReferenceBackend)
    with pytest.raises(ConfigError, match="one of auto, reference"):
        select_backend("flash")
