"""Programs: fusing, buffers, levels and threads; and what is refused before it could write where it should not."""

import gc
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import DTYPES, EPSILON, Product, Threads, assert_near, draw, elementwise, packed, run
from sweeping import each
from torch import Tensor
from unpacking import unpacked

from quire import ops
from quire.attention.native import NativeBackend
from quire.ops import AttentionSpec, activation
from quire.ops.batch import AttentionBatch
from quire.ops.native.builder import ProgramBuilder, Value, recorded
from quire.ops.native.library import Target, library
from quire.ops.native.matrix import PackedMatrix
from quire.ops.native.program import Caches, Program, StepData
from quire.ops.native.structs import TYPE_OF, Epilogue, Type

F32 = torch.float32


def product_of(x: Value, matrix: PackedMatrix) -> Any:
    return ops.linear(recorded(x), matrix)


def test_a_fused_product_is_the_product_and_then_the_rest(level: str) -> None:
    """In float32 nothing is rounded between the kernels, so fusing them changes no bit."""
    matrix, x, residual = packed(draw(64, 45), Type.F32), draw(40, 45), draw(40, 64, seed=1)
    plain = Product(matrix, F32)(x)
    for function in activation.FUNCTIONS:
        alone = elementwise(activation.FUNCTIONS[function], plain)
        assert torch.equal(Product(matrix, F32, function=function)(x), alone), function
    assert torch.equal(Product(matrix, F32, residual=True)(x, residual), plain + residual)


def test_a_value_is_gone_once_it_is_fused(level: str) -> None:
    builder, matrix = ProgramBuilder(F32), packed(draw(8, 8), Type.F32)
    x = builder.input(8)
    product = product_of(x, matrix)
    ops.relu(recorded(product))
    with pytest.raises(AssertionError, match="used after it was fused"):
        ops.layer_norm(recorded(product), None, None, 1e-5)
    product = product_of(x, matrix)
    builder.add(product, x)
    with pytest.raises(AssertionError, match="used after it was fused"):
        builder.add(x, product)


@each({"dtype": DTYPES, "seed": range(8)})
def test_values_live_as_long_as_they_are_needed(level: str, dtype: torch.dtype, seed: int) -> None:
    """Random programs, whose values outlive each other in every order, against the same in fp64."""
    rng = random.Random(seed)
    builder = ProgramBuilder(dtype)
    inputs = [draw(11, 24, dtype=dtype, seed=i) for i in range(2)]
    values: list[Any] = [builder.input(24) for _ in inputs]
    exact = [x.double() for x in inputs]
    for i in range(25):
        a, b = rng.randrange(len(values)), rng.randrange(len(values))
        kind = rng.choice(["linear", "gelu", "norm", "add", "add"])
        if kind == "linear":  # the product itself may be fused to what follows, so only the sum is kept
            matrix = packed(draw(24, 24, seed=i) * 0.2, Type.BF16)
            values.append(product_of(values[a], matrix) + values[b])
            exact.append(exact[a] @ unpacked(matrix).double().t() + exact[b])
        elif kind == "add":
            values.append(values[a] + values[b])
            exact.append(exact[a] + exact[b])
        else:
            values.append(ops.gelu(values[a]) if kind == "gelu" else ops.layer_norm(values[a], None, None, 1e-3))
            fp64: dict[str, Callable[[Tensor], Tensor]] = {
                "gelu": torch.nn.functional.gelu,
                "norm": lambda x: torch.nn.functional.layer_norm(x, (24,), eps=1e-3),
            }
            exact.append(fp64[kind](exact[a]))
    out = torch.full((11, 24), torch.nan, dtype=dtype)
    before = [x.clone() for x in inputs]
    builder.finish(values[-1]).run([*inputs, out])
    scale = max(x.abs().max().item() for x in exact)
    assert_near(out, exact[-1], scale * EPSILON[dtype] * 25, roundings=4)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "an input was written to"


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 1024), (torch.bfloat16, 2048)])
def test_rows_of_whole_pages(level: str, dtype: torch.dtype, width: int) -> None:
    """A program's own rows of that size lie further apart than those of a caller's tensor, and hold the same."""
    wide, narrow = packed(draw(width, 40), Type.BF16), packed(draw(40, width, seed=1), Type.BF16)
    x = draw(70, 40, dtype=dtype)
    builder = ProgramBuilder(dtype)
    value = product_of(ops.layer_norm(product_of(builder.input(40), wide), None, None, 1e-5), narrow)
    inner = elementwise(lambda value: ops.layer_norm(value, None, None, 1e-5), Product(wide, dtype)(x))
    assert torch.equal(run(builder.finish(value), [x], 40, dtype), Product(narrow, dtype)(inner))


def test_reserving_changes_nothing(level: str) -> None:
    product, x = Product(packed(draw(40, 24), Type.F32), F32, function=Epilogue.SILU_MUL), draw(50, 24)
    expected = product(x)
    for rows in (7, 64, 3, 300):
        product.program.reserve(rows)
        assert torch.equal(product(x), expected)


def test_a_program_keeps_what_it_points_to(level: str) -> None:
    product, x = Product(packed(draw(500, 300), Type.F32), F32, bias=draw(500)), draw(4, 300)
    expected = product(x)
    gc.collect()
    scribble = [torch.full((500, 300), 9.0) for _ in range(4)] + [torch.full((500,), 9.0) for _ in range(50)]
    assert torch.equal(product(x), expected)
    del scribble


def test_a_program_stays_on_the_level_it_was_recorded_on(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV cache's layout belongs to a level: changing the default under a running engine must not matter."""
    matrix, x = packed(draw(33, 500), Type.BF16), draw(20, 500, dtype=torch.bfloat16)
    here = Product(matrix, torch.bfloat16, out_dtype=F32)
    expected = here(x)
    monkeypatch.setenv("QUIRE_KERNELS", "portable")
    assert torch.equal(here(x), expected)
    there = Product(matrix, torch.bfloat16, out_dtype=F32)(x)
    assert torch.equal(there, expected) == (level == "portable")


def test_two_threads_at_once(level: str) -> None:
    """Calls on as many kernel threads take turns, others run side by side; meanwhile Python goes on."""
    cases = []
    for i, (features, dtype, count) in enumerate([(64, F32, 2), (200, torch.bfloat16, 2), (33, F32, 3)]):
        x = draw(37, 90, dtype=dtype, seed=i)
        with Threads(count):
            product = Product(packed(draw(features, 90, seed=i), Type.I8), dtype)
            cases.append((product, x, product(x)))
    wrong: list[int] = []

    def work(i: int) -> None:
        product, x, expected = cases[i]
        for _ in range(60):
            if not torch.equal(run(product.program, [x], product.width, product.dtype), expected):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not wrong


def test_programs_keep_their_own_numbers_of_threads(level: str) -> None:
    """Two engines in one process: what the second is given takes nothing from the first."""
    matrix, x = packed(draw(300, 90), Type.F32), draw(20, 90)
    with Threads(2):
        first = Product(matrix, F32)
    second = Product(matrix, F32)
    assert (first.program.target, second.program.target) == (Target(level, 2), Target(level, 1))
    assert torch.equal(first(x), second(x))
    assert first.program.target.num_threads == 2


FORK = """
import os, signal, sys, threading, torch
sys.path.insert(0, {here!r})
from native_cases import Product, Type, draw, packed
torch.set_num_threads(2)
product, x = Product(packed(draw(512, 512), Type.F32), torch.float32), draw(64, 512)
expected = product(x)
stop = threading.Event()
def work():
    while not stop.is_set():
        product(x)
if {busy}:
    threading.Thread(target=work, daemon=True).start()
for _ in range(8):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if all(torch.equal(product(x), expected) for _ in range(3)) else 3)
    assert os.waitpid(child, 0)[1] == 0, "the child hung, or computed something else"
    assert torch.equal(product(x), expected)
stop.set()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "while another thread computes"])
def test_a_forked_child_can_compute(busy: bool) -> None:
    """It has none of the parent's threads, and must not wait for a lock that one of them held."""
    if library() is None:
        pytest.skip("needs the compiled kernels")
    script = FORK.format(here=str(Path(__file__).parent), busy=busy)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- what is refused


def adding_program() -> Program:
    builder = ProgramBuilder(F32)
    return builder.finish(builder.input(6) + builder.input(6))


GOOD = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([GOOD, GOOD], "has 3 bound tensors, got 2"),
        ([GOOD] * 4, "has 3 bound tensors, got 4"),
        ([GOOD, torch.zeros(5, 6), GOOD], r"expected F32 \[4, 6\], got torch.float32 \(5, 6\)"),
        ([GOOD, torch.zeros(4, 7), GOOD], r"expected F32 \[4, 6\], got torch.float32 \(4, 7\)"),
        ([GOOD, GOOD, torch.zeros(3, 6)], r"expected F32 \[3, 6\], got torch.float32 \(4, 6\)"),
        ([GOOD, torch.zeros(24), GOOD], r"expected F32 \[4, 6\], got torch.float32 \(24,\)"),
        ([GOOD.bfloat16(), GOOD, GOOD], "expected F32 .* got torch.bfloat16"),
        ([GOOD, GOOD, GOOD.double()], "expected F32 .* got torch.float64"),
        ([GOOD, torch.zeros(6, 4).t(), GOOD], r"expected F32 \[4, 6\]"),
        ([GOOD, GOOD, torch.zeros(4, 12)[:, ::2]], r"expected F32 \[4, 6\]"),
    ],
)
def test_tensors_are_checked(level: str, tensors: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adding_program().run(tensors)


def step(**changes: Any) -> StepData:
    """A step of two sequences with 3 and 1 tokens."""
    fields: dict[str, Any] = {
        "ids": torch.zeros(4, dtype=torch.int64),
        "positions": torch.tensor([0, 1, 2, 7]),
        "slot_mapping": torch.tensor([16, 17, 18, 39]),
        "query_start_loc": torch.tensor([0, 3, 4]),
        "seq_lens": torch.tensor([3, 8]),
        "block_tables": torch.tensor([[1, 0], [2, 3]]),
        "block_size": 16,
    }
    fields |= changes
    return StepData(fields.pop("ids"), fields.pop("positions"), AttentionBatch(**fields))


def attending(num_layers: int = 1, dtype: torch.dtype = F32) -> tuple[Program, Tensor, Tensor, list[Tensor]]:
    """A program of as many layers, the tensors to run it with, and caches."""
    builder = ProgramBuilder(dtype)
    x = qkv = builder.input(64)
    for layer in range(num_layers):
        spec = AttentionSpec(4, 2, 8, 1.0, layer=layer)
        qkv = ops.prepare(qkv, spec)
        attended = ops.attend(qkv, spec)
    shape = NativeBackend().kv_cache_shape(4, 16, 2, 8)
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(num_layers)]
    assert x is qkv
    return builder.finish(attended), torch.ones(4, 64, dtype=dtype), torch.zeros(4, 32, dtype=dtype), caches


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": torch.zeros(4)}, "contiguous int32 .*, got torch.float32"),
        ({"slot_mapping": torch.zeros(8, dtype=torch.int64)[::2]}, "contiguous int32"),
        ({"block_tables": torch.zeros(2, 2, dtype=torch.int32).t()}, "contiguous int32"),
        ({"positions": torch.arange(5)}, "ids, positions and slots must be of one length"),
        ({"slot_mapping": torch.arange(3)}, "ids, positions and slots must be of one length"),
        ({"query_start_loc": torch.tensor([0, 4])}, "different numbers of sequences"),
        ({"seq_lens": torch.tensor([3])}, "different numbers of sequences"),
        ({"block_tables": torch.tensor([[1, 0]])}, "different numbers of sequences"),
        ({n: torch.arange(5) for n in ("ids", "positions", "slot_mapping")}, "needs a step of as many tokens as rows"),
    ],
)
def test_a_step_is_checked(level: str, changes: dict[str, Tensor], message: str) -> None:
    program, qkv, out, caches = attending()
    program.run([qkv, out], step(), Caches(caches, Type.F32))
    with pytest.raises(ValueError, match=message):
        program.run([qkv, out], step(**changes), Caches(caches, Type.F32))


def test_step_and_caches_must_be_there(level: str) -> None:
    program, qkv, out, caches = attending(num_layers=2)
    with pytest.raises(ValueError, match="needs a step"):
        program.run([qkv, out])
    with pytest.raises(ValueError, match="has 2 layers, got 0 caches"):
        program.run([qkv, out], step())
    with pytest.raises(ValueError, match="has 2 layers, got 1 caches"):
        program.run([qkv, out], step(), Caches(caches[:1], Type.F32))
    with pytest.raises(ValueError, match="needs a step"):
        adding_program().run([GOOD, GOOD, GOOD.clone()], step())


def test_no_rows_no_step(level: str) -> None:
    adding_program().run([torch.zeros(0, 6)] * 3)
    program, qkv, out, caches = attending()
    nobody = torch.zeros(0, dtype=torch.int64)
    names = ("ids", "positions", "slot_mapping", "seq_lens")
    empty = step(
        **dict.fromkeys(names, nobody),
        query_start_loc=torch.zeros(1, dtype=torch.int64),
        block_tables=torch.zeros(0, 1, dtype=torch.int64),
    )
    program.run([qkv[:0], out[:0]], empty, Caches(caches, Type.F32))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda x: ops.rms_norm(x, torch.ones(63), 1e-5), "expected 64 contiguous"),
        (lambda x: ops.layer_norm(x, torch.ones(64), torch.ones(64).double(), 1e-5), "expected 64"),
        (lambda x: ops.prepare(x, AttentionSpec(4, 4, 8, 1.0)), "64 columns are not the"),
        (lambda x: ops.prepare(x, AttentionSpec(4, 3, 8, 1.0)), "64 columns are not the"),
        (lambda x: ops.attend(x, AttentionSpec(4, 3, 8, 1.0)), "whole groups"),
        (lambda x: ops.attend(x, AttentionSpec(1, 1, 513, 1.0)), "head_dim is at most 512"),
        (lambda x: ops.attend(x, AttentionSpec(4, 2, 8, 1.0, sinks=torch.ones(2))), r"sinks must be \[4"),
        (lambda x: ops.prepare(x, AttentionSpec(4, 2, 8, 1.0, q_norm=torch.ones(4))), "expected 8"),
        *(
            (lambda x, t=table: ops.prepare(x, AttentionSpec(4, 2, 8, 1.0, rope=t)), "cos_sin must be")
            for table in (torch.ones(9, 10), torch.ones(9, 8).double(), torch.ones(8, 9).t())
        ),
    ],
)
def test_recording_is_checked(level: str, record: Callable[[Any], object], message: str) -> None:
    builder = ProgramBuilder(F32)
    with pytest.raises(ValueError, match=message):
        record(builder.input(64))
    x = builder.input(64)
    for outputs in (x, [x + x, x], [value := x + x, value]):
        with pytest.raises(ValueError, match="an output must be computed, and be there once"):
            builder.finish(outputs)


# ---- what the host does after an operation, several outputs


def scaled(x: Value, factor: float, after: Callable[[Tensor], Tensor] | None = None) -> Value:
    return x.builder.append("scale", [x], x.width, type=x.type, after=after, size=x.width, factor=factor)


@each({"dtype": DTYPES, "seed": range(6)})
def test_what_the_host_does_anywhere_changes_nothing_else(level: str, dtype: torch.dtype, seed: int) -> None:
    """Random programs, of which the host does a part of some operations, and with native kernels only."""

    def made(with_host: bool) -> list[Tensor]:
        rng = random.Random(seed)
        builder = ProgramBuilder(dtype)
        values = [builder.input(24), builder.input(24)]
        for _ in range(25):
            a, b = rng.choice(values), rng.choice(values)
            kind, host = rng.choice(["add", "halve", "same"]), rng.random() < 0.4
            if kind == "add":
                made = a + b
            elif host and with_host:
                made = scaled(a, 1.0, (lambda x: x * 0.5) if kind == "halve" else lambda x: x)
            else:
                made = scaled(a, 0.5 if kind == "halve" else 1.0)
            values.append(made)
        taps = [values[9], values[-1]]
        program = builder.finish(taps)
        inputs = [draw(11, 24, dtype=dtype, seed=i) for i in range(2)]
        outputs = [torch.full((11, 24), torch.nan, dtype=dtype) for _ in taps]
        for _ in range(2):  # a second run finds nothing of the first
            program.run([*inputs, *outputs])
        assert all(torch.equal(x, draw(11, 24, dtype=dtype, seed=i)) for i, x in enumerate(inputs))
        return outputs

    expected, found = made(False), made(True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert expected[0].isfinite().all()


def test_what_instructions_took_is_told_since_it_was_last_asked_for(level: str) -> None:
    builder = ProgramBuilder(F32)
    program = builder.finish(scaled(builder.input(6), 2.0, lambda x: x + 1))
    assert [(spent.op, spent.calls, spent.seconds) for spent in program.spent()] == [("scale", 0, 0.0)]
    for _ in range(3):
        assert torch.equal(run(program, [GOOD], 6, F32), GOOD * 2 + 1)
    [scale] = program.spent()
    assert scale.seconds > 0
    assert (scale.calls, scale.rows, scale.inner) == (3, 3 * len(GOOD), False)
    assert scale.spec.factor == 2
    assert program.spent()[0].calls == 0


def test_memory_that_the_host_touches_is_used_again(level: str) -> None:
    builder = ProgramBuilder(F32)
    x = builder.input(6)
    for _ in range(20):
        x = scaled(x, 2.0, lambda rows: rows + 1)
    program = builder.finish(x * 1.0)
    assert len(program._bound) <= 2 + 2, "brought, and those of one operation"
    expected = GOOD
    for _ in range(20):
        expected = expected * 2 + 1
    assert torch.equal(run(program, [GOOD], 6, F32), expected)


@pytest.mark.parametrize("result", [torch.zeros(4, 5), torch.zeros(3, 6), torch.zeros(4, 6).double()])
def test_what_the_host_returns_is_checked(level: str, result: Tensor) -> None:
    builder = ProgramBuilder(F32)
    out = scaled(builder.input(6), 1.0, lambda x: result)
    with pytest.raises(
        ValueError, match=r"a host function must return F32 \[4, 6\], got torch.float(32|64) \([34], [56]\)"
    ):
        builder.finish(out).run([GOOD, GOOD.clone()])


def test_a_program_that_waits_for_the_host_is_no_part_of_another(level: str) -> None:
    builder = ProgramBuilder(F32)
    program = builder.finish(scaled(builder.input(6), 2.0, lambda rows: rows + 1), apart=True)
    assert not program.is_whole
    with pytest.raises(AssertionError, match="an operation waits for nobody"):
        ProgramBuilder(F32).part(program)


def test_a_tap_is_not_fused_away(level: str) -> None:
    builder, matrix = ProgramBuilder(F32), packed(draw(8, 8), Type.F32)
    x = builder.input(8)
    product = builder.keep(product_of(x, matrix))
    program = builder.finish([product, product + x])
    rows, tap, out = draw(5, 8), torch.empty(5, 8), torch.empty(5, 8)
    program.run([rows, tap, out])
    assert torch.equal(tap, Product(matrix, F32)(rows))
    assert torch.equal(out, tap + rows)


def test_kv_groups_have_steps_of_their_own(level: str) -> None:
    """Two layers whose tokens lie in other blocks, of another size, equal two programs of one layer each."""
    rows = draw(4, 64)
    other = step(slot_mapping=torch.tensor([40, 41, 42, 15]), block_tables=torch.tensor([[5, 0], [0, 1]]), block_size=8)
    caches = [torch.zeros(NativeBackend().kv_cache_shape(8, size, 2, 8)) for size in (16, 8)]

    def made(layers: list[tuple[int, int]]) -> Program:
        builder = ProgramBuilder(F32)
        outputs = []
        for layer, group in layers:
            spec = AttentionSpec(4, 2, 8, 1.0, layer=layer, group=group)
            outputs.append(ops.attend(ops.prepare(builder.input(64), spec), spec))
        return builder.finish(outputs)

    both = [torch.empty(4, 32) for _ in range(2)]
    made([(0, 0), (1, 1)]).run([rows.clone(), rows.clone(), *both], [step(), other], Caches(caches, Type.F32))
    for found, where, cache in zip(both, (step(), other), caches, strict=True):
        out, fresh = torch.empty(4, 32), torch.zeros_like(cache)
        made([(0, 0)]).run([rows.clone(), out], where, Caches([fresh], Type.F32))
        assert torch.equal(out, found)
        assert torch.equal(fresh, cache)
    with pytest.raises(ValueError, match="has 2 KV groups, got steps of 1"):
        made([(0, 0), (1, 1)]).run([rows, rows, *both], step(), Caches(caches, Type.F32))


def two_layers(dtype: torch.dtype) -> Program:
    """Embeddings and two layers in two KV groups, with a stream that goes past the last attention."""
    builder = ProgramBuilder(dtype)
    index: Any = builder.ids
    x: Any = ops.embedding(index, packed(draw(9, 40), TYPE_OF[dtype]))
    for layer in range(2):
        spec = AttentionSpec(4, 2, 8, 1.0, layer=layer, group=layer)
        qkv, out, mlp = (packed(draw(*size, seed=layer) * 0.3, Type.BF16) for size in ((64, 40), (40, 32), (40, 40)))
        normed = ops.layer_norm(x, None, None, 1e-3)
        x = product_of(ops.attend(ops.prepare(product_of(normed, qkv), spec), spec), out) + x
        x = product_of(ops.layer_norm(x, None, None, 1e-3), mlp) + x
    return builder.finish(x)


@each({"dtype": DTYPES, "wanted": [(), (0,), (2,), (3,), (1, 2), (0, 2, 3)]})
def test_rows_that_are_wanted_alone_are_as_among_all(level: str, dtype: torch.dtype, wanted: tuple[int, ...]) -> None:
    """Bit for bit, and so are all keys and values; whatever the last attention's rows leave out of a sequence."""
    program, ids = two_layers(dtype), torch.tensor([3, 8, 1, 5])
    other = {"slot_mapping": torch.tensor([40, 41, 42, 15]), "block_tables": torch.tensor([[5, 0], [0, 1]])}
    steps = [step(ids=ids), step(ids=ids, block_size=8, **other)]
    shapes = [NativeBackend().kv_cache_shape(8, size, 2, 8) for size in (16, 8)]
    before = [draw(*shape, dtype=dtype) for shape in shapes]  # of tokens that were computed before
    found = {}
    for rows in (None, torch.tensor(wanted, dtype=torch.int32)):
        caches, program_rows = [cache.clone() for cache in before], 4 if rows is None else len(rows)
        out = torch.full((program_rows, 40), torch.nan, dtype=dtype)
        program.spent()
        program.run([out], steps, Caches(caches, TYPE_OF[dtype]), rows)
        found[rows is None] = out, caches
        spent = program.spent()
        assert [each.rows for each in spent if each.op == "prepare"] == [4, 4]
        assert [each.rows for each in spent if each.op == "attention"] == [4, program_rows]
        assert spent[-1].rows == program_rows
    assert torch.equal(found[False][0], found[True][0][list(wanted)])
    assert all(map(torch.equal, found[False][1], found[True][1]))
    assert not torch.equal(found[True][1][1], before[1]), "nothing was written"


def test_rows_that_are_wanted_alone_where_nothing_attends(level: str) -> None:
    builder = ProgramBuilder(F32)
    index: Any = builder.ids
    x: Any = ops.embedding(index, packed(draw(9, 40), Type.F32))
    program, where = builder.finish(ops.layer_norm(x, None, None, 1e-3)), step(ids=torch.tensor([3, 8, 1, 5]))
    whole, memory = torch.empty(4, 40), torch.full((4, 40), 7.0)
    program.run([whole], where)
    program.run([memory[:2]], where, None, torch.tensor([1, 3], dtype=torch.int32))
    assert torch.equal(memory[:2], whole[[1, 3]])
    assert (memory[2:] == 7).all(), "rows were written that nobody wants"


@pytest.mark.parametrize("num_made", [2, 4])
def test_wanted_rows_are_checked(level: str, num_made: int) -> None:
    program, caches = two_layers(F32), [torch.zeros(NativeBackend().kv_cache_shape(8, 16, 2, 8)) for _ in range(2)]
    rows = torch.arange(num_made - num_made % 4 // 2, dtype=torch.int32)  # all, or one where two are to be made
    with pytest.raises(ValueError, match=f"{num_made} of 4 rows, of 1 tensors, can't be computed alone"):
        program.run([torch.zeros(num_made, 40)], [step(), step()], Caches(caches, Type.F32), rows)


def test_more_slots_than_int32_can_count_are_refused(level: str) -> None:
    program, qkv, out, _ = attending()
    cache = torch.empty(1).expand(2**27 + 1, 1)  # blocks of 16 tokens
    with pytest.raises(ValueError, match="are more than the 2147483648 slots that int32 can count"):
        program.run([qkv, out], step(), Caches([cache], Type.F32))


def test_both_integer_types_are_taken(level: str) -> None:
    program, qkv, out, caches = attending()
    program.run([qkv.clone(), out], step(), Caches(caches, Type.F32))
    narrow = step(**{n: t.int() for n, t in vars(step()).items() if isinstance(t, Tensor)})
    again = torch.zeros_like(out)
    program.run([qkv.clone(), again], narrow, Caches(caches, Type.F32))
    assert torch.equal(again, out)
    assert all(narrow.__dict__[n] is t for n, t in vars(narrow).items())


def test_the_host_uses_one_of_torchs_threads(level: str) -> None:
    """Torch's threads spin after each operation, on the cores of the kernels' own."""
    seen: list[int] = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return x * 2

    builder = ProgramBuilder(F32)
    program, x = builder.finish(scaled(builder.input(4), 1.0, function)), torch.ones(3, 4)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        program.run([x, torch.empty(3, 4)])
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)
