"""The backend of Triton kernels: near the reference in all it computes, and bit-exact however a step is composed.

Without a GPU the kernels are interpreted, which takes milliseconds for each program: few tokens, large tiles.
"""

import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged import (
    Sequence,
    attend,
    attend_once,
    dense,
    make_sequences,
    make_spec,
    poisoned_cache,
    whole,
)
from test_trees import Verified
from torch import Tensor

pytest.importorskip("triton")

from quire import ops
from quire.attention.base import AttentionBackend, AttentionBatch, AttentionSpec, SlotMoves
from quire.attention.registry import select_backend
from quire.attention.step import AdapterBatch, Step
from quire.config.draft_tree import DraftTree
from quire.ops.lora import LoraLayer, VirtualRows
from quire.ops.triton import attention, rope
from quire.ops.triton.common import INTERPRETED
from quire.ops.triton.pages import open_pages
from tests.paths import paths_of

pytestmark = [
    pytest.mark.skipif(not INTERPRETED.value, reason="with a GPU, tests/gpu/test_attention.py shows this"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of NaN and infinity
]
REFERENCE = select_backend("reference")
KINDS = ["triton", "triton-int8", "triton-fp8"]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "TOKENS", 128)
    monkeypatch.setattr(attention, "AHEAD", 1)


def backend(kind: str = "triton") -> AttentionBackend:
    return select_backend(kind)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "window"),
    [
        ((1, 1), 64, 16, None),
        ((4, 2), 80, 32, None),
        ((4, 1), 96, 16, 20),
        ((7, 1), 128, 32, 64),
        ((8, 1), 256, 16, 1),
        ((24, 1), 64, 16, 100),
        ((2, 1), 8, 5, None),
    ],
)
def test_equals_the_reference(
    heads: tuple[int, int], head_dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    sequences = make_sequences([1, 75], heads, head_dim, dtype)
    steps = [[1, 64], [0, 1], [0, 10]]  # long contexts, then few tokens, as after a prefix hit
    found = attend(backend(), sequences, steps, block_size, window)
    for one, two in zip(found, attend(REFERENCE, sequences, steps, block_size, window), strict=True):
        assert one.dtype == dtype
        bound = TOLERANCE[dtype] * (2 if dtype == torch.bfloat16 else 1)
        torch.testing.assert_close(one, two, atol=bound, rtol=bound)


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0, 1.0])},
    "both, and a window": {
        "softcap": 2.0, "sinks": torch.tensor([0.5, -2.0, 3.0, 90.0]), "window": 30, "scale": 3.0
    },
    "without order": {"causal": False},
    "without order, in a window": {"causal": False, "window": 30},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "programs"), [(torch.bfloat16, 0), pytest.param(torch.float32, 1000, marks=pytest.mark.slow)]
)
def test_options(options: dict[str, Any], dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By programs that walk all the keys, and by several with a span each."""
    monkeypatch.setattr(attention, "PROGRAMS", programs)
    monkeypatch.setattr(attention, "SPAN", 16)
    sequences = make_sequences([1, 36], (4, 1), 40, dtype)
    found = attend(backend(), sequences, whole(sequences), 16, **options)
    for sequence, out in zip(sequences, found, strict=True):
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        expected = dense(sequence, **({"scale": 40**-0.5, "window": None} | options))
        torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound)


def test_nothing_before_the_start_is_seen() -> None:
    """Of position 0 a drafting head has no key: its slot holds NaN."""
    [sequence] = make_sequences([30], (2, 1), 16)
    later = Sequence(*(part[1:] for part in (sequence.query, sequence.key, sequence.value)))
    for name in ("triton", "reference"):
        cache = poisoned_cache(backend(name), 2, 16, (1, 16), torch.float32)
        rows, slots = torch.tensor([0, 29]).int(), torch.arange(1, 30).int()
        batch = AttentionBatch(rows, torch.tensor([30]).int(), torch.arange(2)[None].int(), slots, 16)
        spec = make_spec(sequence, start=1)
        found = attend_once(backend(name), later, spec, cache, backend(name).build(batch))
        torch.testing.assert_close(found.double(), dense(later, 0.25, None), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        pytest.param("triton", torch.float32, {}, marks=pytest.mark.slow),
        pytest.param("triton", torch.bfloat16, OPTIONS["both, and a window"], marks=pytest.mark.slow),
        pytest.param("triton-int8", torch.bfloat16, {"window": 20}, marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_composition(
    kind: str, dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the block size, nor on who adds up the spans of keys."""
    monkeypatch.setattr(attention, "SPAN", 16)
    sequences = make_sequences([2, 50, 20], (4, 1), 32, dtype)
    for sequence in sequences:
        sequence.query *= 30  # large scores: their rounding shows in the weights
    monkeypatch.setattr(attention, "PROGRAMS", 0)
    expected = attend(backend(kind), sequences, whole(sequences), 16, **options)
    variants = {
        "small steps, spans by two programs": (7, [[0, 42, 17], [0, 7, 0], [1, 0, 2], [1, 1, 1]], 8),
        "as many programs as spans": (1000, [[0, 20, 0], [0, 13, 8], [1, 0, 11], [1, 17, 1]], 32),
        "none": (0, [[0, 33, 0], [1, 16, 18], [1, 1, 2]], 5),
    }
    for name, (programs, steps, block_size) in variants.items():
        monkeypatch.setattr(attention, "PROGRAMS", programs)
        found = attend(backend(kind), sequences, steps, block_size, seed=len(name), **options)
        assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=False)), name


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("triton", torch.bfloat16, {}),
        pytest.param("triton-int8", torch.float32, {"window": 7}, marks=pytest.mark.slow),
    ],
)
def test_a_node_of_a_draft_tree_has_the_bits_of_a_chain(
    kind: str, dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PROGRAMS", 0)
    monkeypatch.setattr(attention, "SPAN", 16)
    tree = DraftTree.read("[(0,), (1,), (0, 0)]")
    run = Verified(backend(kind), tree, [0, 30], dtype, 5)
    run.prefill(options)
    for s, found in enumerate(run.verify(options)):
        n = run.lengths[s]
        assert torch.equal(found[0], run.chain(s, list(range(n + 1)), options)[-1:])
        for node, path in enumerate(paths_of(tree)):
            chain = [*range(n + 1), *(n + 1 + ancestor for ancestor in path)]
            assert torch.equal(found[1 + node], run.chain(s, chain, options)[-1:]), (s, node)


@pytest.mark.parametrize("shared", [99, 163, 224])  # KiB, of Ada and consumers' Blackwell, of Ampere, of Hopper
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, torch.bfloat16), (256, torch.bfloat16), (512, torch.bfloat16), (128, torch.float32), (256, torch.float32)],
)
def test_a_tile_has_room(head_dim: int, dtype: torch.dtype, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, and keys and values that they meet, as Triton has all of them in shared memory in float32."""
    monkeypatch.setattr(attention, "_limits", lambda device: (False, shared << 10))
    query, spec = torch.empty(1, 8 * head_dim, dtype=dtype), AttentionSpec(8, 2, head_dim, 1.0)
    rows, span, _, stages = attention._tile(query, 1, dtype.itemsize, spec)
    assert (rows + 2 * span * stages) * head_dim * dtype.itemsize <= shared << 10
    assert span >= 16, "less than a matrix instruction takes"


# ---- eight bits


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "bound"), [("triton-int8", 0.005), ("triton-fp8", 0.025)])
@pytest.mark.parametrize(
    ("heads", "head_dim", "window"),
    [((2, 1), 8, None), ((7, 1), 40, 30), pytest.param((2, 2), 128, None, marks=pytest.mark.slow)],
)
def test_eight_bits_are_near(
    kind: str, bound: float, heads: tuple[int, int], head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    sequences = make_sequences([1, 90], heads, head_dim, dtype)
    found = attend(backend(kind), sequences, [[1, 88], [0, 2]], 16, window)
    for sequence, out in zip(sequences, found, strict=True):
        values = sequence.value.double()
        error = (out.double() - dense(sequence, head_dim**-0.5, window)).abs() / (values.max() - values.min())
        assert error.max() < 5 * bound
        assert error.square().mean().sqrt() < bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "most"), [("triton-int8", 127), ("triton-fp8", 14)])
def test_eight_bits_are_exact_where_they_are_enough(kind: str, most: int, dtype: torch.dtype) -> None:
    """Small integers: errors of the layout would show whole."""
    [sequence] = make_sequences([70], (2, 1), 64, dtype)
    generator = torch.Generator().manual_seed(3)
    for name in ("key", "value"):
        drawn = torch.randint(-most, most + 1, getattr(sequence, name).shape, generator=generator)
        drawn[..., 0] = most
        setattr(sequence, name, (drawn if kind == "triton-int8" else drawn // 2 * 2 * 16).to(dtype))
    sequence.query *= 1 / 256
    [eight] = attend(backend(kind), [sequence], [[70]], 16)
    [full] = attend(backend(), [sequence], [[70]], 16)
    torch.testing.assert_close(eight, full, atol=1e-4 if dtype == torch.float32 else 1.0, rtol=1e-2)


@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", ["key", "value"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_broken_stays_visible(kind: str, broken: str, value: float) -> None:
    sequences = make_sequences([12, 9], (2, 1), 16)
    clean = attend(backend(kind), sequences, [[8, 9], [4, 0]], 16)
    getattr(sequences[0], broken)[9, 0, 3] = value
    found = attend(backend(kind), sequences, [[8, 9], [4, 0]], 16)
    assert torch.equal(found[0][:8], clean[0][:8])
    assert torch.equal(found[1], clean[1])
    shows = ~found[0][9:].isfinite().flatten(1).all(1)
    assert shows.any() if value == torch.inf else shows.all()  # an infinite key may as well get a weight of 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_never_written_shows(kind: str) -> None:
    [sequence] = make_sequences([12], (4, 2), 8)
    cache = poisoned_cache(backend(kind), 2, 16, (2, 8), torch.float32)
    slots, rows = torch.arange(16, 28).int(), torch.tensor([0, 12]).int()
    batch = AttentionBatch(rows, torch.tensor([13]).int(), torch.tensor([[1]]).int(), slots, 16)
    assert attend_once(backend(kind), sequence, make_spec(sequence), cache, batch)[-1].isnan().all()
    backend(kind).fill_blocks(cache, torch.arange(2), 0.0)
    assert not cache.any()


def test_a_cache_takes_the_room_it_says() -> None:
    assert backend().kv_cache_shape(9, 16, 2, 40) == (9, 2, 2, 16 * 40)
    assert backend().kv_cache_dtype(torch.bfloat16) == torch.bfloat16
    for kind in KINDS[1:]:  # a scale of 4 bytes a token
        assert backend(kind).kv_cache_shape(9, 16, 2, 40) == (9, 2, 2, 16 * 44)
        assert backend(kind).kv_cache_dtype(torch.bfloat16) == torch.int8


@pytest.mark.parametrize("kind", KINDS)
def test_moved_tokens_and_copied_blocks_are_themselves(kind: str) -> None:
    """A token is computed again from where it was moved to: blocks 1 and 2 become 3 and, token by token, 4 and 5."""
    [sequence] = make_sequences([30], (2, 2), 24)
    cache = poisoned_cache(backend(kind), 6, 16, (2, 24), torch.float32)

    def attended(part: slice, blocks: list[int]) -> Tensor:
        low, high = part.start, part.stop
        slots = torch.tensor([blocks[p // 16] * 16 + p % 16 for p in range(low, high)]).int()
        rows = torch.tensor([0, high - low]).int()
        batch = AttentionBatch(rows, torch.tensor([high]).int(), torch.tensor([blocks]).int(), slots, 16)
        return attend_once(backend(kind), sequence[part], make_spec(sequence), cache, batch)

    whole_, [last] = attended(slice(0, 30), [1, 2]), attended(slice(29, 30), [1, 2])
    assert torch.equal(whole_[-1], last)
    sources = torch.arange(16, 46).int()
    backend(kind).move_slots(cache, SlotMoves(sources, sources + 48, 16, torch.float32))
    backend(kind).copy_blocks(cache, torch.tensor([1]), torch.tensor([3]))
    for blocks in ([4, 5], [3, 5]):
        assert torch.equal(attended(slice(29, 30), blocks)[0], last)


# ---- norms, rotation, virtual tokens


@pytest.mark.pairs
@pytest.mark.parametrize("norms", [False, True, "plus one"])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "tables"), [(40, 20, 1), (64, 64, 1), (64, 64, 2), (96, 0, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_rotation(dtype: torch.dtype, head_dim: int, rotary_dim: int, tables: int, norms: bool | str) -> None:
    generator = torch.Generator().manual_seed(5)
    angles = torch.rand(60, rotary_dim // 2, generator=generator) * 6
    weights = (torch.randn(2, head_dim, generator=generator) * 0.2 + (norms != "plus one")).to(dtype)
    q_norm, k_norm = (weights[0].clone(), weights[1].clone()) if norms else (None, None)
    spec = AttentionSpec(
        4, 2, head_dim, 0.3, q_norm=q_norm, k_norm=k_norm, norm_eps=1e-5, norm_plus_one=norms == "plus one",
        rope=torch.cat((angles.cos(), angles.sin()), 1) if rotary_dim else None,
    )  # fmt: skip
    if tables == 2 and spec.rope is not None:
        spec = replace(spec, rope=torch.stack((spec.rope, spec.rope * 0.5 ** (torch.arange(60)[:, None] % 3))))
    qkv = torch.randn(33, spec.qkv_size, generator=generator).to(dtype)
    positions, slots = torch.arange(20, 53).int(), torch.randperm(48)[:33].int()
    slots[4] = -1  # a row that pads a batch
    cache = poisoned_cache(backend(), 3, 16, (2, head_dim), dtype)
    untouched = qkv.clone()
    query = rope.prepare(qkv, open_pages(cache, 16, "model"), slots, positions, spec)[:, : 4 * head_dim]
    assert torch.equal(qkv, untouched)
    heads = qkv.view(33, 8, head_dim)
    expected, key = heads[:, :4], heads[:, 4:6]
    if q_norm is not None and k_norm is not None:
        expected = ops.rms_norm(expected, q_norm, 1e-5, spec.norm_plus_one)
        key = ops.rms_norm(key, k_norm, 1e-5, spec.norm_plus_one)
    if spec.rope is not None:
        expected, key = ops.rotary(expected, key, positions, spec.rope)
    tokens = cache.unflatten(3, (16, head_dim)).permute(0, 3, 1, 2, 4).reshape(48, 2, 2, head_dim)
    here = torch.arange(33) != 4
    stored = tokens[slots[here].long()]
    assert torch.equal(stored[:, 1], heads[:, 6:][here])
    bound = 4e-7 if dtype == torch.float32 else 1e-2 if norms else 0
    torch.testing.assert_close(query.reshape(33, 4, head_dim), expected, atol=bound, rtol=bound)
    torch.testing.assert_close(stored[:, 0], key[here], atol=bound, rtol=bound)
    assert tokens.isnan().flatten(1).all(1).sum() == 48 - 32


def test_virtual_tokens_have_the_keys_and_values_of_their_adapter() -> None:
    [sequence] = make_sequences([20], (4, 2), 16)
    layer = LoraLayer([0, 64], 2, 0, torch.float32, None)
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    layer.put(1, {0: VirtualRows(rows)})
    spec = make_spec(sequence, prefix=layer, window=18)
    qkv = torch.cat((sequence.query, sequence.key, sequence.value), 1).flatten(1)
    found = []
    for name in ("triton", "reference"):
        cache = poisoned_cache(backend(name), 2, 16, (2, 16), torch.float32)
        numbers = torch.arange(20).int()
        batch = AttentionBatch(numbers[[0, 10]], numbers[[10]], torch.tensor([[1, 0]]).int(), numbers[:10] + 16, 16)
        adapters = AdapterBatch(torch.full((10,), 1).int())
        step = Step(numbers[:10], [cache], [backend(name).build(batch)], adapters)
        found.append(backend(name).attend(qkv[:10].clone(), spec, step))
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=1e-5)


# ---- what a GPU needs


def _padded(batch: AttentionBatch, rows: int) -> AttentionBatch:
    """With so many sequences of one token and no length, and one of no token."""
    starts = torch.cat((batch.query_start_loc, batch.query_start_loc[-1] + torch.arange(1, rows + 1).int()))
    starts = torch.cat((starts, starts[-1:]))
    tables = torch.cat((batch.block_tables, torch.zeros(rows + 1, batch.block_tables.shape[1]).int()))
    nothing = torch.zeros(rows + 1).int()
    slots = torch.cat((batch.slot_mapping, nothing[1:] - 1))
    return AttentionBatch(starts, torch.cat((batch.seq_lens, nothing)), tables, slots, batch.block_size)


@pytest.mark.parametrize("programs", [0, 1000])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 7}], ids=["causal", "without order", "window"])
def test_rows_that_pad_a_batch_are_inert(
    programs: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PROGRAMS", programs)
    monkeypatch.setattr(attention, "SPAN", 16)
    sequences = make_sequences([3, 3], (2, 1), 16)
    tables = torch.tensor([[1, 2], [3, 4]]).int()
    rows, lengths = torch.tensor([0, 1, 3]).int(), torch.tensor([18, 20]).int()
    batch = AttentionBatch(rows, lengths, tables, torch.tensor([33, 66, 67]).int(), 16)
    qkv = torch.cat((sequences[0].query, sequences[0].key, sequences[0].value), 1).flatten(1)
    spec, found, caches = make_spec(sequences[0], **options), [], []
    for pad in (0, 3):
        cache = torch.randn(6, 2, 1, 256, generator=torch.Generator().manual_seed(2))
        given = _padded(batch, pad) if pad else batch
        x = torch.cat((qkv, torch.full((pad, 64), torch.nan)))
        found.append(backend().attend(x, spec, Step(torch.zeros(3 + pad).int(), [cache], [given])))
        caches.append(cache)
    assert torch.equal(found[1][:3], found[0])
    assert not found[1][3:].any()
    assert torch.equal(*caches)


def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step can be captured: the sizes of grids and of what is allocated follow from shapes."""
    sequences = make_sequences([40, 3], (4, 2), 16)
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__index__", "nonzero"):
        monkeypatch.setattr(Tensor, name, lambda *args, name=name: pytest.fail(f"{name} reads a tensor"))
    qkv = torch.cat((sequences[0].query, sequences[0].key, sequences[0].value), 1).flatten(1)
    arrays = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [5, 30], [[1, 0], [2, 3]], [20, 61]))
    for kind in KINDS:
        shape = backend(kind).kv_cache_shape(4, 16, 2, 16)
        cache = torch.zeros(shape, dtype=backend(kind).kv_cache_dtype(torch.float32))
        step = Step(torch.zeros(2).int(), [cache], [backend(kind).build(AttentionBatch(*arrays, 16))])
        backend(kind).attend(qkv[:2].contiguous(), make_spec(sequences[0]), step)
        arrays = (step.attention[0].query_start_loc, step.attention[0].seq_lens, *vars(step.attention[0]).values())
        arrays = (array for array in list(arrays)[2:6])


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_beyond_31_bits(kind: str) -> None:
    """Blocks far apart in memory of which only a few pages are ever touched; 32 bits would end at other ones."""
    stride, num_blocks = (1 << 29) + 2048, 8  # elements
    no_reserve = 0x4000  # mmap.MAP_NORESERVE of later Pythons
    dtype = backend(kind).kv_cache_dtype(torch.bfloat16)
    size = 2 * num_blocks * stride * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError:
        pytest.skip(f"needs {size} bytes of addresses")
    [sequence] = make_sequences([20], (4, 2), 16, torch.bfloat16)
    shape = backend(kind).kv_cache_shape(num_blocks, 16, 2, 16)
    near = torch.zeros(shape, dtype=dtype)
    far = torch.frombuffer(memory, dtype=dtype).as_strided(shape, (stride, *near.stride()[1:]), num_blocks * stride)
    found = []
    for cache in (near, far):
        numbers = torch.arange(128).int()
        slots = torch.cat((numbers[112:128], numbers[64:68]))  # block 7, then block 4
        batch = AttentionBatch(numbers[[0, 20]], numbers[[20]], torch.tensor([[7, 4]]).int(), slots, 16)
        attend_once(backend(kind), sequence, make_spec(sequence), cache, batch)
        backend(kind).move_slots(cache, SlotMoves(numbers[64:68], numbers[96:100], 16, torch.bfloat16))  # to block 6
        batch = AttentionBatch(numbers[[0, 20]], numbers[[20]], torch.tensor([[7, 6]]).int(), slots[:16], 16)
        query = torch.cat((sequence.query, sequence.key, sequence.value), 1).flatten(1)
        found.append(attention.paged_attention(query, open_pages(cache, 16, _kind(kind)), batch, make_spec(sequence)))
    assert torch.equal(*found)
    assert found[0].any()


def _kind(name: str) -> Any:
    return name.removeprefix("triton-") if "-" in name else "model"
