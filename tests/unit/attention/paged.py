"""Random sequences, dense attention in fp64, and runs of the sequences through a paged backend in any steps."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch, AttentionSpec
from quire.attention.native import NativeBackend
from quire.attention.step import Step
from quire.ops.native.builder import ProgramBuilder, recorded
from quire.ops.native.program import Caches, StepData
from quire.ops.native.structs import TYPE_OF


@dataclass
class Sequence:
    """All that a sequence will ever be: query [L, Hq, D], key and value [L, Hkv, D]."""

    query: Tensor
    key: Tensor
    value: Tensor

    def __len__(self) -> int:
        return len(self.query)

    def __getitem__(self, part: slice) -> "Sequence":
        return Sequence(self.query[part], self.key[part], self.value[part])


def make_sequences(
    lengths: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, num_heads: int) -> Tensor:
        return torch.randn(length, num_heads, head_dim, generator=generator).to(dtype)

    return [Sequence(draw(n, heads[0]), draw(n, heads[1]), draw(n, heads[1])) for n in lengths]


def dense(sequence: Sequence, scale: float, window: int | None, **options: Any) -> Tensor:
    """Attention in fp64, written down directly; options as in `AttentionSpec`: softcap, sinks, causal."""
    query, key, value = (x.double().transpose(0, 1) for x in (sequence.query, sequence.key, sequence.value))
    group = len(query) // len(key)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    distance = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))
    causal = options.get("causal", True)
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden |= (distance if causal else distance.abs()) >= window
    scores = query @ key.transpose(1, 2) * scale
    if softcap := options.get("softcap"):
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(hidden, -torch.inf)
    if (sinks := options.get("sinks")) is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(sequence), 1)), 2)
        value = torch.cat((value, torch.zeros_like(value[:, :1])), 1)
    return (scores.softmax(-1) @ value).transpose(0, 1)


def poisoned_cache(
    backend: AttentionBackend, num_blocks: int, block_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """A cache for KV heads and their size in which whatever is read before it is written shows as NaN."""
    shape = backend.kv_cache_shape(num_blocks, block_size, *heads)
    cache = torch.empty(shape, dtype=backend.kv_cache_dtype(dtype))
    backend.fill_blocks(cache, torch.arange(num_blocks), float("nan"))
    return cache


def make_spec(sequence: Sequence, window: int | None = None, **options: Any) -> AttentionSpec:
    """Attention of one layer over heads of a sequence's shape; the scale is 1 / sqrt(head_dim) unless given."""
    (_, num_heads, head_dim), num_kv_heads = sequence.query.shape, sequence.key.shape[1]
    options = {"scale": head_dim**-0.5} | options
    return AttentionSpec(num_heads, num_kv_heads, head_dim, window=window, **options)


def attend_now(backend: AttentionBackend, qkv: Tensor, spec: AttentionSpec, step: Step) -> Tensor:
    """One layer's attention by itself: what records it is run as a program of its own."""
    if not isinstance(backend, NativeBackend):
        return backend.attend(qkv, spec, step)
    builder = ProgramBuilder(qkv.dtype)
    attended: Any = backend.attend(recorded(builder.input(spec.qkv_size)), spec, step)
    program = builder.finish(attended)
    out = qkv.new_empty(qkv.shape[0], spec.num_heads * spec.head_dim)
    batch: AttentionBatch = step.attention[spec.group]
    data = [StepData(batch.slot_mapping, step.positions, batch)] * (spec.group + 1)
    cache = step.caches[spec.layer]
    program.run([qkv.contiguous(), out], data, Caches([cache] * (spec.layer + 1), TYPE_OF[cache.dtype]))
    return out


def attend_once(
    backend: AttentionBackend,
    sequence: Sequence,
    spec: AttentionSpec,
    cache: Tensor,
    metadata: Any,
) -> Tensor:
    """One step with all tokens of what is given, at the positions 0 ..: [T, Hq, D]."""
    qkv = torch.cat((sequence.query, sequence.key, sequence.value), 1).flatten(1)
    out = attend_now(backend, qkv, spec, Step(torch.arange(len(sequence), dtype=torch.int32), [cache], [metadata]))
    return out.view(sequence.query.shape)


def attend(
    backend: AttentionBackend,
    sequences: list[Sequence],
    steps: list[list[int]],
    block_size: int,
    window: int | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Tensor]:
    """Run sequences through the paged backend; steps[i][s] is the number of tokens of sequence s in step i.

    Blocks are scattered, and hold NaN until they are written, as do those of nobody.
    """
    spec = make_spec(sequences[0], window, **options)
    num_blocks = [-(-len(s) // block_size) for s in sequences]
    free = list(range(1, sum(num_blocks) + 3))
    random.Random(seed).shuffle(free)
    table = torch.zeros(len(sequences), max(num_blocks), dtype=torch.int64)
    for s, count in enumerate(num_blocks):
        table[s, :count] = torch.tensor([free.pop() for _ in range(count)])
    heads = spec.num_kv_heads, spec.head_dim
    cache = poisoned_cache(backend, sum(num_blocks) + 3, block_size, heads, sequences[0].key.dtype)
    computed = [0] * len(sequences)
    found: list[list[Tensor]] = [[] for _ in sequences]
    for step in steps:
        live = [s for s, count in enumerate(step) if count]
        spans = [(s, computed[s], computed[s] + step[s]) for s in live]
        rows = torch.tensor([0] + [high - low for _, low, high in spans]).cumsum(0)
        slots = [table[s, p // block_size] * block_size + p % block_size for s, a, b in spans for p in range(a, b)]
        lengths = torch.tensor([high for _, _, high in spans])
        width = -(-int(lengths.max()) // block_size)
        tables = table[live, :width].contiguous()
        arrays = (rows, lengths, tables, torch.stack(slots))
        metadata = backend.build(AttentionBatch(*(array.int() for array in arrays), block_size))
        parts = (
            torch.cat([getattr(sequences[s], name)[a:b] for s, a, b in spans]) for name in ("query", "key", "value")
        )
        out = attend_once(backend, Sequence(*parts), spec, cache, metadata)
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


def variants(sequences: list[Sequence]) -> dict[str, tuple[list[list[int]], int]]:
    """Other ways to compute the same than token by token alone: name -> steps, block size."""
    return {
        "whole": (whole(sequences), 16),
        "alone whole": (alone(sequences, 1000), 16),
        "chunks of 7": (alone(sequences, 7), 8),
        "chunks of 64": (alone(sequences, 64), 64),
        "mixed": (mixed(sequences, 2), 1),
        "mixed again": (mixed(sequences, 3), 5),
    }
