"""Every attention backend: right against dense attention in fp64, and bit-exact however a step is composed."""

from typing import Any

import pytest
import torch
from paged import alone, attend, attend_once, dense, make_sequences, make_spec, mixed, poisoned_cache, variants, whole
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.attention.native import NativeBackend
from quire.attention.reference import ReferenceBackend
from quire.attention.registry import select_backend
from quire.errors import ConfigError

Backend = AttentionBackend
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(4, 4), (4, 2), (6, 1), (7, 1), (24, 1), (14, 2)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "window"), [*((h, None) for h in HEADS), *(((4, 2), w) for w in (1, 20, 64, 100))])
def test_equals_dense_attention(
    backend: Backend, heads: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    sequences = make_sequences([1, 63, 64, 65, 150], heads, 8, dtype)
    for steps in (whole(sequences), mixed(sequences, 1)):
        for sequence, out in zip(sequences, attend(backend, sequences, steps, 16, window), strict=True):
            assert out.dtype == dtype
            expected, bound = dense(sequence, 8**-0.5, window), TOLERANCE[dtype]
            torch.testing.assert_close(out.double(), expected, atol=bound, rtol=max(bound, 1e-5))


@pytest.mark.pairs
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(backend: Backend, head_dim: int, dtype: torch.dtype) -> None:
    sequences = make_sequences([70, 5], (4, 2), head_dim, dtype)
    found = attend(backend, sequences, whole(sequences), 16)
    for sequence, out in zip(sequences, found, strict=True):
        expected, bound = dense(sequence, head_dim**-0.5, None), TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound)
    for one, two in zip(found, attend(backend, sequences, alone(sequences, 3), 8), strict=True):
        assert torch.equal(one, two)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "window"), [((4, 4), None), ((4, 2), None), ((7, 1), None), ((24, 1), None), ((4, 2), 30), ((7, 1), 64)]
)
def test_bits_do_not_depend_on_composition(
    backend: Backend, dtype: torch.dtype, window: int | None, heads: tuple[int, int]
) -> None:
    sequences = make_sequences([3, 64, 150, 40], heads, 128, dtype)
    for sequence in sequences:
        sequence.query *= 30  # large scores: their rounding shows in the weights
    expected = attend(backend, sequences, alone(sequences, 1), 16, window)
    for name, (steps, block_size) in variants(sequences).items():
        found = attend(backend, sequences, steps, block_size, window, seed=len(name))
        for one, two in zip(expected, found, strict=True):
            assert torch.equal(one, two), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(backend: Backend, dtype: torch.dtype) -> None:
    sequences = make_sequences([3, 64, 300, 40], (8, 2), 32, dtype)
    expected = attend(backend, sequences, mixed(sequences, 1), 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = attend(backend, sequences, mixed(sequences, 1), 16)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-3, 30.0, 1e4])
def test_scores_of_any_magnitude(backend: Backend, dtype: torch.dtype, magnitude: float) -> None:
    """Weights that are all alike, or all on one token."""
    sequences = make_sequences([130], (2, 1), 32, dtype)
    sequences[0].query *= magnitude
    [out] = attend(backend, sequences, mixed(sequences, 5), 16)
    expected, bound = dense(sequences[0], 32**-0.5, None), TOLERANCE[dtype] * max(1, magnitude)
    torch.testing.assert_close(out.double(), expected, atol=min(bound, 0.02), rtol=min(bound, 0.02))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_sequence_breaks_no_other(backend: Backend, dtype: torch.dtype) -> None:
    sequences = make_sequences([30, 17, 80], (4, 2), 16, dtype)
    expected = attend(backend, sequences, mixed(sequences, 6), 16)
    for name, value in (("query", torch.nan), ("key", torch.inf), ("value", torch.nan)):
        getattr(sequences[1], name)[:] = value
    found = attend(backend, sequences, mixed(sequences, 6), 16)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2], expected[2])
    assert found[1].isnan().all()


SCORES: list[dict[str, Any]] = [
    {"softcap": 5.0},
    {"sinks": torch.tensor([0.5, -2.0, 3.0, 1.0])},
    {"softcap": 2.0, "sinks": torch.tensor([0.5, -2.0, 3.0, 90.0]), "window": 30, "scale": 3.0},
]


@pytest.mark.sweep
@pytest.mark.parametrize("options", SCORES, ids=["softcap", "sinks", "both, and a window"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1.0, 30.0])
def test_softcaps_and_sinks(backend: Backend, options: dict[str, Any], dtype: torch.dtype, magnitude: float) -> None:
    sequences = make_sequences([3, 150, 65], (4, 2), 40, dtype)
    for sequence in sequences:
        sequence.query *= magnitude
    expected = attend(backend, sequences, alone(sequences, 1), 16, **options)
    for sequence, out in zip(sequences, expected, strict=True):
        exact = dense(sequence, **({"scale": 40**-0.5, "window": None} | options))
        bound = (1e-5 if dtype == torch.float32 else 1e-2) * (3 if magnitude > 1 else 1)
        torch.testing.assert_close(out.double(), exact, atol=bound, rtol=bound)
    for name, (steps, block_size) in variants(sequences).items():
        found = attend(backend, sequences, steps, block_size, seed=len(name), **options)
        assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True)), name


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "size"), [(100, 16), (100, 32), (64, 64), (65, 32), (300, 128), (1100, 32)])
@pytest.mark.parametrize("chunk", [1, 33, 200])
def test_nothing_before_the_first_visible_tile_is_read(
    backend: Backend, dtype: torch.dtype, window: int, size: int, chunk: int
) -> None:
    """Blocks that end before the 64-token tile of the first visible position belong to others: they hold NaN."""
    length, start = window + 260, window + 100 if chunk == 1 else 0
    [sequence] = make_sequences([length], (4, 2), 8, dtype)
    [expected] = attend(backend, [sequence], [[length]], 64, window)
    num_blocks = -(-length // size)
    cache = poisoned_cache(backend, num_blocks, size, (2, 8), dtype)
    steps = [(0, start)] if start else []
    steps += [(low, min(low + chunk, length)) for low in range(start, min(start + 40 * chunk, length), chunk)]
    for low, high in steps:
        backend.fill_blocks(cache, torch.arange(max(0, low - window + 1) // 64 * 64 // size), float("nan"))
        rows, slots = torch.tensor([0, high - low]), torch.arange(low, high)
        metadata = backend.build(AttentionBatch(rows, rows[1:] + low, torch.arange(num_blocks)[None], slots, size))
        out = attend_once(backend, sequence[low:high], make_spec(sequence, window), cache, metadata)
        assert torch.equal(out, expected[low:high])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_blocks_that_left_the_window_are_never_read(backend: Backend, chunk: int, dtype: torch.dtype) -> None:
    """A manager may free them: they are poisoned before each step."""
    window, size = 20, 8
    [sequence] = make_sequences([120], (4, 2), 8, dtype)
    [expected] = attend(backend, [sequence], [[120]], 16, window)
    cache = poisoned_cache(backend, 15, size, (2, 8), dtype)
    for start in range(0, 120, chunk):
        stop = min(start + chunk, 120)
        backend.fill_blocks(cache, torch.arange(max(0, start - window + 1) // size), float("nan"))
        rows = torch.tensor([0, stop - start])
        slots = torch.arange(start, stop)
        metadata = backend.build(AttentionBatch(rows, rows[1:] + start, torch.arange(15)[None], slots, size))
        out = attend_once(backend, sequence[start:stop], make_spec(sequence, window), cache, metadata)
        assert torch.equal(out, expected[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_never_written_shows(backend: Backend, dtype: torch.dtype) -> None:
    """The debug mode relies on it: a sequence that claims more tokens than were written gets NaN."""
    [sequence] = make_sequences([12], (4, 2), 8, dtype)
    cache = poisoned_cache(backend, 2, 16, (2, 8), dtype)
    slots, one = torch.arange(12), torch.tensor([0, 12])
    metadata = backend.build(AttentionBatch(one, torch.tensor([13]), torch.tensor([[1]]), slots + 16, 16))
    assert attend_once(backend, sequence, make_spec(sequence), cache, metadata)[-1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_reads_before_it_writes(backend: Backend, dtype: torch.dtype) -> None:
    shape = backend.kv_cache_shape(4, 2, 1, 3)
    cache = torch.arange(4.0, dtype=dtype).view(4, *[1] * (len(shape) - 1)).repeat(1, *shape[1:])
    backend.copy_blocks(cache, torch.tensor([0, 1]), torch.tensor([1, 3]))
    assert cache.flatten(1)[:, -1].tolist() == [0, 0, 2, 1]
    assert all((block == block.flatten()[0]).all() for block in cache)
    backend.fill_blocks(cache, torch.tensor([2]), float("nan"))
    assert cache[2].isnan().all()
    assert not cache[[0, 1, 3]].isnan().any()


def test_a_copied_block_is_the_block(backend: Backend) -> None:
    [sequence] = make_sequences([16], (4, 2), 8)
    cache = poisoned_cache(backend, 4, 16, (2, 8), torch.float32)

    def attended(part: slice, block: int) -> Tensor:
        low, high = part.start, part.stop
        slots, rows = torch.arange(low, high) + 16 * block, torch.tensor([0, high - low])
        metadata = backend.build(AttentionBatch(rows, torch.tensor([high]), torch.tensor([[block]]), slots, 16))
        return attend_once(backend, sequence[part], make_spec(sequence), cache, metadata)

    attended(slice(0, 15), 1)
    backend.copy_blocks(cache, torch.tensor([1]), torch.tensor([3]))
    one, two = (attended(slice(15, 16), block) for block in (1, 3))
    assert torch.equal(one, two)
    assert one.isfinite().all()


def test_registry() -> None:
    assert isinstance(select_backend("reference"), ReferenceBackend)
    assert not select_backend("native").int8
    assert isinstance(select_backend("native-int8"), NativeBackend)
    assert select_backend("native-int8").int8
    with pytest.raises(ConfigError, match="native-int8, triton, triton-int8, triton-fp8; got 'flash'"):
        select_backend("flash")
