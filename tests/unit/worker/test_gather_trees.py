"""The nodes of trees of drafts, gathered: tokens, positions and slots against plain loops."""

import random
from operator import add

import numpy as np
import pytest

from quire import SamplingParams
from quire.config.draft_tree import DraftTree
from quire.ops.native.library import library
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import NewSequence, ScheduledSequence
from quire.worker.gather import StepArrays, _in_numpy, _natively, gather, gather_nodes
from quire.worker.rows import Row, RowTable, TreeShape
from tests.paths import paths_of

SIZE, GROUPS = 4, 2
TREE = DraftTree.read("[(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]")


def test_the_shape_of_a_tree_has_the_path_of_each_node() -> None:
    shape = TreeShape(DraftTree.read("[(1,), (0, 0), (0,), (0, 2), (1, 0), (0, 2, 5)]"))
    assert shape.depths.tolist() == [1, 1, 2, 2, 2, 3, 0]
    paths = [path[:depth] for path, depth in zip(shape.ancestors.tolist(), shape.depths, strict=True)]
    assert paths == [[0], [1], [0, 2], [0, 3], [1, 4], [0, 3, 5], []]
    assert [sum(path[depth:]) for path, depth in zip(shape.ancestors, shape.depths, strict=True)] == [0] * 7


@pytest.fixture
def table() -> RowTable:
    """Three rows, each with a prompt of its own length and drafts for the whole tree."""
    groups = [CacheGroup([group]) for group in range(GROUPS)]
    layout = CacheLayout(block_size=SIZE, groups=groups, num_blocks=[], max_model_len=40)
    table = RowTable(5, layout, len(TREE), TREE)
    rng = random.Random(1)
    for number, length in enumerate([1, 7, 12]):
        task = SamplingTask(params=SamplingParams(), max_tokens=9, stop_token_ids=frozenset(), seed=1)
        prompt = [rng.randrange(100) for _ in range(length)]
        table.requests[str(number)] = NewRequest(request_id=str(number), prompt_token_ids=prompt, task=task)
        blocks = [[100 * g + 10 * number + i for i in range(-(-(length + len(TREE)) // SIZE))] for g in range(GROUPS)]
        row = table.add(NewSequence(number, str(number), 0, [], blocks, length - 1))
        row.tokens.set_drafts([200 + 10 * number + node for node in range(len(TREE))])
    return table


def slot(table: RowTable, group: int, row: Row, place: int) -> int:
    return int(table.block_tables[group, row.index, place // SIZE]) * SIZE + place % SIZE


def check(table: RowTable, arrays: StepArrays, expected: list[tuple[Row, list[int], list[int], list[int]]]) -> None:
    """`expected`: of each sequence of attention its row, places and positions of its tokens, and places of its tail."""
    assert arrays.tails is not None
    assert arrays.query_start_loc.tolist() == np.cumsum([0, *(len(places) for _, places, *_ in expected)]).tolist()
    assert arrays.input_ids.tolist() == [int(row.tokens.ids[p]) for row, places, *_ in expected for p in places]
    assert arrays.positions.tolist() == [p for _, _, positions, _ in expected for p in positions]
    assert arrays.seq_lens.tolist() == [positions[-1] + 1 for _, _, positions, _ in expected]
    for group in range(GROUPS):
        slots = [slot(table, group, row, place) for row, places, *_ in expected for place in places]
        assert arrays.slot_mappings[group].tolist() == slots
        for i, (row, _, positions, tail) in enumerate(expected):
            width = -(-(positions[-1] + 1) // SIZE)
            held = table.block_tables[group, row.index, :width]
            assert arrays.block_tables[group][i, :width].tolist() == held.tolist()
            start = int(arrays.tails.starts[i])
            if not tail:
                assert start > positions[-1]  # the newest token, or what has no tree
                continue
            assert start + len(tail) == positions[-1] + 1
            of_tail = arrays.tails.slots[group][i, : len(tail)].tolist()
            assert of_tail == [slot(table, group, row, place) for place in tail]
    assert all(array.dtype == np.int32 for array in (arrays.positions, arrays.seq_lens, *arrays.slot_mappings))


def node_of(row: Row, base: int, node: int) -> tuple[Row, list[int], list[int], list[int]]:
    path = paths_of(TREE)[node]
    return row, [base + node], [base + len(path) - 1], [base + ancestor for ancestor in path]


def test_a_step_with_trees_and_without(table: RowTable) -> None:
    table.rows[2].num_computed = 8
    scheduled = [
        ScheduledSequence(0, 1 + len(TREE), num_drafts=len(TREE)),
        ScheduledSequence(2, 4),
        ScheduledSequence(1, 1 + 3, num_drafts=3),
    ]
    batch = gather(scheduled, table)
    assert batch.ends == [7, 11, 15]
    zero, one, two = (table.rows[i] for i in range(3))
    expected = [(zero, [0], [0], []), *(node_of(zero, 1, node) for node in range(6))]
    expected += [(two, [8, 9, 10, 11], [8, 9, 10, 11], [])]
    expected += [(one, [6], [6], []), *(node_of(one, 7, node) for node in range(3))]
    check(table, batch.arrays, expected)
    assert batch.arrays.tails is not None
    assert batch.arrays.tails.counts.tolist() == [7, *[0] * 6, 1, 4, 0, 0, 0]


def test_some_nodes_alone(table: RowTable) -> None:
    """As a proposer computes them, level by level."""
    one, two = table.rows[1], table.rows[2]
    batch = gather_nodes([two, one], [12, 5], [0, 2], [range(2, 5), range(2)], table)
    assert batch.ends == [3, 7]
    expected = [node_of(two, 12, node) for node in (2, 3, 4)]
    expected += [(one, [5, 6], [5, 6], []), *(node_of(one, 7, node) for node in (0, 1))]
    check(table, batch.arrays, expected)
    assert batch.arrays.tails is not None
    assert batch.arrays.tails.counts.tolist() == [3, 0, 0, 1, 2, 0]


def test_a_step_without_drafts_has_no_tails(table: RowTable) -> None:
    assert gather([ScheduledSequence(0, 1), ScheduledSequence(1, 1)], table).arrays.tails is None


def test_a_step_of_trees_alone(table: RowTable) -> None:
    zero, two = table.rows[0], table.rows[2]
    scheduled = [ScheduledSequence(2, 1 + 2, num_drafts=2), ScheduledSequence(0, 1), ScheduledSequence(1, 1)]
    batch = gather(scheduled, table)
    expected = [(two, [11], [11], []), node_of(two, 12, 0), node_of(two, 12, 1)]
    check(table, batch.arrays, [*expected, (zero, [0], [0], []), (table.rows[1], [6], [6], [])])


@pytest.mark.skipif(library() is None, reason="needs the compiled library")
@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 7, 5], [1], [5], [3, 0, 1]])
def test_the_compiled_library_gathers_what_numpy_does(table: RowTable, counts: list[int]) -> None:
    rows = [table.rows[number] for number in (2, 1, 0)[: len(counts)]]
    first = [9, 0, 2][: len(counts)]
    places, num_blocks = [row.index for row in rows], -(-max(map(add, first, counts)) // SIZE)
    natively, in_numpy = (make(places, first, counts, num_blocks, table) for make in (_natively, _in_numpy))
    for name in ("input_ids", "positions", "query_start_loc", "seq_lens", "block_tables", "slot_mappings"):
        ours, twins = getattr(natively, name), getattr(in_numpy, name)
        for one, twin in zip(*(found if isinstance(found, list) else [found] for found in (ours, twins)), strict=True):
            assert one.dtype == twin.dtype == np.int32
            assert one.tolist() == twin.tolist(), name
