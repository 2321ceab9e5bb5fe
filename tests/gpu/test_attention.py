"""Paged attention at the sizes of real models on a GPU: right, and the same bits for a row however a step is composed.

The interpreter can't show this: which instructions a tile compiles to, and how they sum, is the device's.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "attention"))

from paged import Sequence, attend, dense, make_sequences, make_spec
from torch import Tensor

from quire.attention.base import AttentionBatch
from quire.attention.registry import select_backend
from quire.attention.step import Step
from quire.ops.triton import attention

DEVICE = torch.device("cuda")
KINDS = ["triton", "triton-int8", *(["triton-fp8"] if torch.cuda.get_device_capability() >= (8, 9) else [])]
BOUND = {"triton": 2e-2, "triton-int8": 5e-2, "triton-fp8": 2e-1}


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with DEVICE, torch.inference_mode():
        yield


def sequences_of(
    lengths: list[int], heads: tuple[int, int], head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> list[Sequence]:
    with torch.device("cpu"):
        made = make_sequences(lengths, heads, head_dim, dtype)
    return [Sequence(*(x.to(DEVICE) for x in (one.query, one.key, one.value))) for one in made]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((14, 2), 64), ((8, 4), 256), ((4, 4), 80)])
@pytest.mark.parametrize("options", [{}, {"window": 300}, {"softcap": 20.0}, {"causal": False}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_dense_attention(
    kind: str, heads: tuple[int, int], head_dim: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    sequences = sequences_of([1, 700, 90], heads, head_dim, dtype)
    given = {"window": None} | options
    for sequence, out in zip(
        sequences, attend(select_backend(kind), sequences, [[1, 700, 90]], 16, **given), strict=True
    ):
        expected = dense(sequence, head_dim**-0.5, **given)
        torch.testing.assert_close(out.double(), expected, atol=BOUND[kind], rtol=BOUND[kind])


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((14, 2), 64), ((8, 4), 256)])
@pytest.mark.parametrize("options", [{}, {"window": 300, "softcap": 20.0}])
def test_bits_do_not_depend_on_composition(
    kind: str, heads: tuple[int, int], head_dim: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the block size, on the rows of a tile, or on who adds up the spans of keys."""
    sequences = sequences_of([3, 1000, 400], heads, head_dim)
    for sequence in sequences:
        sequence.query *= 30  # large scores: their rounding shows in the weights
    monkeypatch.setattr(attention, "PROGRAMS", 0)
    expected = attend(select_backend(kind), sequences, [[3, 1000, 400]], 16, **options)
    ways = {
        "one by one": (512, [[1, 990, 395], *([int(i < 2), 1, int(i < 5)] for i in range(10))], 16),
        "chunks of a few": (100, [[0, 985, 380], [3, 7, 5], [0, 3, 10], [0, 5, 5]], 32),
        "chunks": (4000, [[0, 512, 0], [2, 255, 399], [1, 1, 1], [0, 232, 0]], 64),
        "chunks, walked": (0, [[0, 65, 0], [2, 640, 390], [1, 295, 10]], 128),
    }
    for name, (programs, steps, block_size) in ways.items():
        monkeypatch.setattr(attention, "PROGRAMS", programs)
        found = attend(select_backend(kind), sequences, steps, block_size, seed=len(name), **options)
        for s, (one, two) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(one, two), (name, s, (one != two).flatten(1).any(1).nonzero()[:9, 0].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_replayed(kind: str) -> None:
    """With other lengths than it was captured with, and rows that pad the batch."""
    backend, count, size = select_backend(kind), 4, 16
    [sequence] = sequences_of([count], (32, 8), 128)
    qkv = torch.cat((sequence.query, sequence.key, sequence.value), 1).flatten(1)
    shape = backend.kv_cache_shape(count * 64, size, 8, 128)
    start = torch.randint(0, 100, shape, dtype=torch.int32)
    cache = start.to(backend.kv_cache_dtype(torch.bfloat16))
    if kind != "triton":  # scales, too, are to be numbers
        cache[..., size * 128 :].view(torch.float32).fill_(0.01)
    tables = torch.arange(count * 64).view(count, 64).int()
    lengths, slots = torch.zeros(count).int(), torch.full((count,), -1).int()
    batch = AttentionBatch(torch.arange(count + 1).int(), lengths, tables, slots, size)
    spec, step = make_spec(sequence), Step(torch.zeros(count).int(), [cache], [backend.build(batch)])

    def run() -> Tensor:
        return backend.attend(qkv, spec, step)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for given in ([1, 1000, 17, 0], [300, 0, 0, 0], [5, 5, 1024, 257]):
        lengths.copy_(torch.tensor(given))
        slots.copy_(torch.tensor([s * 1024 + n - 1 if n else -1 for s, n in enumerate(given)]))
        graph.replay()
        assert torch.equal(out, run())
        assert not out[lengths == 0].any()
        assert out[lengths > 0].isfinite().all()
