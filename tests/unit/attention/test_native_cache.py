"""The native KV cache: keys normed and rotated on their way into it, and eight bits in place of the model's type."""

from pathlib import Path

import pytest
import torch
from both_ways import told_both_ways
from native_cases import at_page_end
from paged import (
    Sequence,
    alone,
    attend,
    attend_now,
    attend_once,
    dense,
    make_sequences,
    make_spec,
    mixed,
    poisoned_cache,
    variants,
    whole,
)
from torch import Tensor

from quire import ops
from quire.attention.base import AttentionBatch, AttentionSpec
from quire.attention.native import NativeBackend
from quire.attention.registry import select_backend
from quire.attention.step import Step
from quire.ops.native.builder import ProgramBuilder
from quire.ops.native.library import TORCH, Target, levels, loaded_library
from quire.ops.native.program import Caches, StepData
from quire.ops.native.structs import Type

INT8 = NativeBackend(int8=True)
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(4, 4), (4, 2), (7, 1), (24, 1)]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "window"), [*((h, None) for h in HEADS), ((4, 2), 30)])
@pytest.mark.parametrize("head_dim", [8, 40, 128])
def test_int8_is_near_dense_attention(
    level: str, head_dim: int, heads: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    sequences = make_sequences([1, 65, 150], heads, head_dim, dtype)
    for sequence, out in zip(sequences, attend(INT8, sequences, mixed(sequences, 1), 16, window), strict=True):
        values = sequence.value.double()
        error = (out.double() - dense(sequence, head_dim**-0.5, window)).abs()
        assert error.max() < 0.02 * (values.max() - values.min())
        assert error.square().mean().sqrt() < 0.005 * (values.max() - values.min())


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "window"), [((4, 2), None), ((7, 1), None), ((4, 2), 30)])
def test_int8_bits_do_not_depend_on_composition(
    level: str, dtype: torch.dtype, heads: tuple[int, int], window: int | None
) -> None:
    sequences = make_sequences([3, 64, 150, 40], heads, 40, dtype)
    for sequence in sequences:
        sequence.query *= 30  # large scores: their rounding shows in the weights
    expected = attend(INT8, sequences, alone(sequences, 1), 16, window)
    for name, (steps, block_size) in variants(sequences).items():
        found = attend(INT8, sequences, steps, block_size, window, seed=len(name))
        assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True)), name
    torch.set_num_threads(2)
    found = attend(INT8, sequences, whole(sequences), 16, window)
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("group", [*range(1, 10), 12, 16, 24])
def test_blocks_that_lie_well_change_no_bit(level: str, group: int, int8: bool) -> None:
    """Few rows meet blocks of 32 tokens where they lie (csrc/attention_dot.h), some at a time; others are gathered."""
    sequences = make_sequences([1, 31, 33, 64, 97, 150], (2 * group, 2), 80, torch.bfloat16)
    steps = mixed(sequences, 4)
    runs = (attend(NativeBackend(int8=int8), sequences, steps, size) for size in (16, 32))
    assert all(torch.equal(gathered, direct) for gathered, direct in zip(*runs, strict=True))


IN_BOTH_WAYS = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import torch
from paged import attend, make_sequences, mixed, whole
from quire.attention.native import NativeBackend
CASES = [
    ((4, 2), 128, 32, {}),
    ((7, 1), 80, 16, {"softcap": 3.0}),
    ((2, 2), 40, 32, {"window": 50}),
    ((16, 1), 64, 5, {}),
]
for heads, head_dim, block_size, options in CASES:
    sequences = make_sequences([1, 33, 97, 150], heads, head_dim, torch.bfloat16)
    sequences[1].query[:, 0, 5:9] = torch.tensor([1e-39, float("inf"), float("nan"), 3e38])
    sequences[2].value[:, 0, 3] *= 1e-37
    sequences[3].key[40, 0, 1:3] = torch.tensor([float("inf"), -1e-39])
    for int8 in (False, True):
        for steps in (whole(sequences), mixed(sequences, 4)):
            found = attend(NativeBackend(int8), sequences, steps, block_size, **options)
            print(heads, int8, *(hashlib.sha1(bits.view(torch.int16).numpy().tobytes()).hexdigest() for bits in found))
"""


@pytest.mark.slow
def test_bits_by_pairs_and_as_floats() -> None:
    """Whichever a CPU has done with first: the same bits."""
    assert len(told_both_ways(IN_BOTH_WAYS, Path(__file__).parent)) == 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_exact_where_eight_bits_are_enough(level: str, dtype: torch.dtype) -> None:
    """Small integers whose largest is 127: scales of 1. Errors of the layout would show whole."""
    [sequence] = make_sequences([100], (2, 1), 64, dtype)
    generator = torch.Generator().manual_seed(3)
    for name in ("key", "value"):
        drawn = torch.randint(-127, 128, getattr(sequence, name).shape, generator=generator)
        drawn[..., 0] = 127
        setattr(sequence, name, drawn.to(dtype))
    sequence.query *= 1 / 64
    [eight] = attend(INT8, [sequence], [[100]], 16)
    [full] = attend(NativeBackend(), [sequence], [[100]], 16)
    bound = 1e-4 if dtype == torch.float32 else 1.0
    torch.testing.assert_close(eight.float(), full.float(), atol=bound, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", ["key", "value"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_int8_keeps_what_is_broken_visible(level: str, dtype: torch.dtype, broken: str, value: float) -> None:
    [sequence] = make_sequences([20], (2, 1), 40, dtype)
    [clean] = attend(INT8, [sequence], alone([sequence], 1), 16)
    getattr(sequence, broken)[9, 0, 3] = value
    [found] = attend(INT8, [sequence], alone([sequence], 1), 16)
    assert torch.equal(found[:9], clean[:9])
    shows = found[9:].isnan().flatten(1).any(1)
    assert shows.any() if value == torch.inf else shows.all()  # an infinite key may as well get a weight of 0


def test_int8_poison_shows(level: str) -> None:
    [sequence] = make_sequences([12], (4, 2), 8)
    cache = poisoned_cache(INT8, 2, 16, (2, 8), torch.float32)
    slots, rows = torch.arange(12), torch.tensor([0, 12])
    step = AttentionBatch(rows, torch.tensor([13]), torch.tensor([[1]]), slots + 16, 16)
    assert attend_once(INT8, sequence, make_spec(sequence), cache, step)[-1].isnan().all()
    INT8.fill_blocks(cache, torch.arange(2), 0.0)
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_int8_cache_takes_the_room_it_says(dtype: torch.dtype) -> None:
    assert INT8.kv_cache_dtype(dtype) == torch.int8
    assert NativeBackend().kv_cache_dtype(dtype) == dtype
    # 40 features are padded to 64; a scale of 4 bytes a token.
    assert INT8.kv_cache_shape(9, 16, 2, 40) == (9, 2, 2, 16 * 68)
    assert NativeBackend().kv_cache_shape(9, 16, 2, 40) == (9, 2, 2, 16 * 64)


# ---- norms and rotation, as a model's layers record them


class Layer:
    """Norms, rotation and attention of one layer, with HEADS[1]; `expected` does the same in fp64."""

    def __init__(self, dtype: torch.dtype, head_dim: int, rotary_dim: int, norms: bool | str) -> None:
        generator = torch.Generator().manual_seed(5)
        angles = torch.rand(200, rotary_dim // 2, generator=generator) * 6
        self.table = torch.cat((angles.cos(), angles.sin()), 1)
        weights = (torch.randn(2, head_dim, generator=generator) * 0.2 + (norms != "plus one")).to(dtype)
        self.norms = (weights[0].clone(), weights[1].clone()) if norms else (None, None)
        q_norm, k_norm = self.norms
        self.plus_one = norms == "plus one"
        self.spec = AttentionSpec(
            4, 2, head_dim, 0.3, window=30, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-5, rope=self.table,
            norm_plus_one=self.plus_one,
        )  # fmt: skip

    def expected(self, sequence: Sequence) -> Tensor:
        query, key, value = (x.float() for x in (sequence.query, sequence.key, sequence.value))
        if self.norms[0] is not None and self.norms[1] is not None:
            query = ops.rms_norm(query, self.norms[0].float(), 1e-5, self.plus_one)
            key = ops.rms_norm(key, self.norms[1].float(), 1e-5, self.plus_one)
        query, key = ops.rotary(query, key, torch.arange(len(sequence)), self.table)
        return dense(Sequence(query, key, value), 0.3, 30)


@pytest.mark.sweep
@pytest.mark.pairs
@pytest.mark.parametrize("norms", [False, True, "plus one"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (40, 20), (64, 64), (128, 2)])
@pytest.mark.parametrize("name", ["native", "native-int8", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_rotation(
    level: str, dtype: torch.dtype, name: str, head_dim: int, rotary_dim: int, norms: bool | str
) -> None:
    layer, backend = Layer(dtype, head_dim, rotary_dim, norms), select_backend(name)
    [sequence] = make_sequences([90], (4, 2), head_dim, dtype)
    rows = torch.cat((sequence.query, sequence.key, sequence.value), 1).flatten(1)

    def computed(chunk: int, block_size: int) -> Tensor:
        blocks = torch.arange(90 // block_size + 1).flip(0)
        cache = at_page_end(poisoned_cache(backend, len(blocks), block_size, (2, head_dim), dtype))
        parts = []
        for low in range(0, 90, chunk):
            positions = torch.arange(low, min(low + chunk, 90))
            slots = blocks[positions // block_size] * block_size + positions % block_size
            count = torch.tensor([0, len(positions)])
            batch = AttentionBatch(count, count[1:] + low, blocks[None], slots, block_size)
            step = Step(positions, [cache], [backend.build(batch)])
            parts.append(attend_now(backend, at_page_end(rows[positions]), layer.spec, step))
        return torch.cat(parts)

    found = computed(90, 16)
    bound = 0.15 if name == "native-int8" else 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double().view(90, 4, head_dim), layer.expected(sequence), atol=bound, rtol=bound)
    assert torch.equal(computed(1, 8), found)
    assert torch.equal(computed(17, 64), found)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize(("heads", "length", "num_threads"), [((4, 1), 2600, 4), ((8, 8), 4200, 2)])
def test_long_contexts_are_split_among_threads_without_a_trace(
    level: str,
    dtype: torch.dtype,
    int8: bool,
    heads: tuple[int, int],
    length: int,
    num_threads: int,
    window: int | None,
) -> None:
    """Spans of 1,024 keys, by one thread one after the other or by several at once.

    One KV head leaves nothing else, and of many some follow each other then.
    """
    backend = NativeBackend(int8)
    [sequence] = make_sequences([length], heads, 16, dtype)
    decodes = [[length - 10], *([1] for _ in range(10))]
    torch.set_num_threads(1)
    [expected] = attend(backend, [sequence], [[length]], 64, window)
    [alone_] = attend(backend, [sequence], decodes, 32, window)
    assert torch.equal(alone_, expected)
    torch.set_num_threads(num_threads)
    for block_size in (16, 32):
        [split] = attend(backend, [sequence], decodes, block_size, window)
        assert torch.equal(split, expected)
    if not int8:
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(split.double(), dense(sequence, 0.25, window), atol=tolerance, rtol=tolerance)


@pytest.fixture
def native_level() -> None:
    if levels() == [TORCH]:
        pytest.skip("needs the compiled kernels")


def test_what_many_threads_and_long_contexts_take_is_bounded(native_level: None) -> None:
    """A partial result for each task and span would be 41 MB; all sequences share one block."""
    length, count, threads = 160_000, 62, 16
    target = Target(levels()[0], threads)
    builder = ProgramBuilder(torch.float32, target)
    query = builder.input(8 * 64)
    program = builder.finish(ops.attend(query, AttentionSpec(8, 1, 64, 1.0)))
    cache = torch.zeros(NativeBackend().kv_cache_shape(1, 1024, 1, 64))
    zeros = torch.zeros(count, dtype=torch.int32)
    batch = AttentionBatch(
        query_start_loc=torch.arange(count + 1),
        seq_lens=torch.full((count,), length),
        block_tables=torch.zeros(count, -(-length // 1024), dtype=torch.int32),
        slot_mapping=zeros,
        block_size=1024,
    )
    step = StepData(zeros, zeros, batch)
    out = torch.empty(count, 8 * 64)
    program.run([torch.zeros(count, 8 * 64), out], step, Caches([cache], Type.F32))
    assert not out.any()
    per_thread = 1 << 18
    assert loaded_library().quire_scratch_bytes(threads) < (32 << 20) + threads * per_thread
