"""A step's input arrays, gathered from the persistent rows with a handful of numpy calls.

The model runner calls `gather` once a step. The arrays are made anew each time: what a device may still be reading
is never written again. It knows the rows and the plan, and nothing of models, devices or sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.protocol.step import ScheduledSequence
from quire.worker.rows import Row, RowTable

INT = np.int32  # of all that kernels index by
_NO_TAIL = np.iinfo(INT).max

Ints = npt.NDArray[INT]


class TailArrays(NamedTuple):
    """As `quire.attention.base.Tails`: starts and counts [S], and by KV group the slots [S, W]."""

    starts: Ints
    counts: Ints
    slots: list[Ints]


@dataclass(slots=True)
class StepArrays:
    """A step of S sequences with T tokens in all, as a device is given it; see `quire.attention.base.AttentionBatch`.

    Attributes:
        input_ids, positions: [T].
        query_start_loc: [S + 1].
        seq_lens: [S], tokens computed before this step plus those computed in it.
        block_tables: by KV group, [S, max_blocks].
        slot_mappings: by KV group, [T].
        tails: where drafts are a tree, each node of which is a sequence then.
    """

    input_ids: Ints
    positions: Ints
    query_start_loc: Ints
    seq_lens: Ints
    block_tables: list[Ints]
    slot_mappings: list[Ints]
    block_size: int
    tails: TailArrays | None = None


@dataclass(slots=True)
class StepBatch:
    """What one step computes.

    Attributes:
        rows: the persistent row of each of S sequences.
        ends: for each sequence, the index in [0, T) after that of its last token.
    """

    rows: list[Row]
    ends: list[int]
    arrays: StepArrays


def gather(scheduled: Sequence[ScheduledSequence], table: RowTable) -> StepBatch:
    """Gather the inputs of a step, of one sequence at least, whose rows are up to date with the plan."""
    rows = [table.rows[s.sequence_id] for s in scheduled]
    first = [row.num_computed for row in rows]
    if table.tree is not None and any(s.num_drafts for s in scheduled):
        counts = [s.num_new_tokens - s.num_drafts for s in scheduled]
        return gather_nodes(rows, first, counts, [range(s.num_drafts) for s in scheduled], table)
    return gather_tokens(rows, first, [s.num_new_tokens for s in scheduled], table)


def gather_tokens(rows: list[Row], first: Sequence[int], counts: Sequence[int], table: RowTable) -> StepBatch:
    """Likewise for `counts[i]` tokens, drafts included, of row i from position `first[i]` on."""
    if len(rows) == 1:
        count = counts[0]
        one = _next_token(rows[0], first[0], table) if count == 1 else _next_tokens(rows[0], first[0], count, table)
        return StepBatch(rows, [count], one)
    indices = np.array([row.index for row in rows])
    starts = np.array(first, INT)
    if max(counts) == 1:  # all decode: most steps are this
        ends = list(range(1, len(rows) + 1))
        query_start_loc = np.arange(len(rows) + 1, dtype=INT)
        positions, row_of_token, seq_lens = starts, indices, starts + 1
    else:
        query_start_loc = np.zeros(len(rows) + 1, INT)
        np.cumsum(counts, out=query_start_loc[1:])
        ends = query_start_loc[1:].tolist()
        # Token t of sequence s: position = starts[s] + (t - query_start_loc[s]).
        positions = np.arange(ends[-1], dtype=INT) + np.repeat(starts - query_start_loc[:-1], counts)
        row_of_token = np.repeat(indices, counts)
        seq_lens = starts + np.array(counts, INT)
    block_size = table.block_size
    block, offset = np.divmod(positions, block_size)
    num_blocks = -(-max(map(add, first, counts)) // block_size)
    block_tables: list[Ints] = []
    slot_mappings: list[Ints] = []
    for tables in table.block_tables:
        slots = tables[row_of_token, block]
        slots *= block_size
        slots += offset
        slot_mappings.append(slots)
        block_tables.append(tables[indices, :num_blocks])
    input_ids = table.token_ids[row_of_token, positions]
    arrays = StepArrays(input_ids, positions, query_start_loc, seq_lens, block_tables, slot_mappings, block_size)
    return StepBatch(rows, ends, arrays)


def gather_nodes(
    rows: list[Row], first: Sequence[int], counts: Sequence[int], nodes: Sequence[range], table: RowTable
) -> StepBatch:
    """Likewise, where drafts are a tree: of row i `counts[i]` tokens, >= 0, and then these nodes after them.

    A node's token, and its slots, are at the position of its number after those tokens; what it is computed as, its
    position in the sequence, follows from its depth.
    """
    assert table.tree is not None, "drafts are no tree"
    indices: list[int] = []  # of what attention takes for a sequence
    lengths: list[int] = []
    bases: list[int] = []
    numbers: list[int] = []  # -1 for what is no node
    starts: list[int] = []  # of tails
    trees: list[int] = []  # how many are of one tree, of which the newest token is the root
    ends: list[int] = []
    for row, start, count, part in zip(rows, first, counts, nodes, strict=True):
        own = [*range(bool(count)), *part]
        if count:
            own[0] = -1
        indices += [row.index] * len(own)
        bases += [start + count] * len(own)
        numbers += own
        lengths += [count] * bool(count) + [1] * len(part)
        apart = count > 1 or (count > 0 and not part)
        size = len(own) - apart
        starts += [_NO_TAIL] * apart + [start + count] * size
        trees += [1] * apart + ([size] + [0] * (size - 1)) * bool(size)
        ends.append((ends[-1] if ends else 0) + count + len(part))
    index, base, number = np.array(indices), np.array(bases, INT), np.array(numbers, INT)
    seq_lens = base + table.tree.depths[number]
    if max(counts) <= 1:  # nodes and newest tokens
        query_start_loc = np.arange(len(index) + 1, dtype=INT)
        row_of_token, positions, places = index, seq_lens - INT(1), base + number
    else:
        length = np.array(lengths, INT)
        query_start_loc = np.zeros(len(index) + 1, INT)
        np.cumsum(length, out=query_start_loc[1:])
        within = np.arange(ends[-1], dtype=INT) - np.repeat(query_start_loc[:-1], length)
        positions = within + np.repeat(seq_lens - length, length)
        places = within + np.repeat(np.where(number < 0, base - length, base + number), length)
        row_of_token = np.repeat(index, length)
    above, num_blocks = base[:, None] + table.tree.ancestors[number], -(-int(seq_lens.max()) // table.block_size)
    input_ids, slots = table.token_ids[row_of_token, places], table.slots(row_of_token, places)
    block_tables = [tables[index, :num_blocks] for tables in table.block_tables]
    tails = TailArrays(np.array(starts, INT), np.array(trees, INT), table.slots(index[:, None], above))
    arrays = StepArrays(input_ids, positions, query_start_loc, seq_lens, block_tables, slots, table.block_size, tails)
    return StepBatch(rows, ends, arrays)


def _next_tokens(row: Row, start: int, count: int, table: RowTable) -> StepArrays:
    """Some tokens of one sequence, as a lone stream has them where it drafts."""
    block_size, num_blocks = table.block_size, -(-(start + count) // table.block_size)
    positions = np.arange(start, start + count, dtype=INT)
    block, offset = np.divmod(positions, block_size)
    block_tables = [held[row.index : row.index + 1, :num_blocks].copy() for held in table.block_tables]
    input_ids = row.tokens.ids[start : start + count].copy()
    slots = [held[0, block] * INT(block_size) + offset for held in block_tables]
    query_start_loc, seq_lens = np.array([0, count], INT), np.array([start + count], INT)
    return StepArrays(input_ids, positions, query_start_loc, seq_lens, block_tables, slots, block_size)


def _next_token(row: Row, position: int, table: RowTable) -> StepArrays:
    """One token of one sequence: a lone stream's every step, where each call of numpy shows in a small model's time."""
    block_size = table.block_size
    place = position // block_size
    slots = [int(held[row.index, place]) * block_size + position % block_size for held in table.block_tables]
    slot_mappings = [np.array([slot], INT) for slot in slots]
    input_ids, positions = row.tokens.ids[position : position + 1].copy(), np.array([position], INT)
    query_start_loc, seq_lens = np.array([0, 1], INT), np.array([position + 1], INT)
    block_tables = [held[row.index : row.index + 1, : place + 1].copy() for held in table.block_tables]
    return StepArrays(input_ids, positions, query_start_loc, seq_lens, block_tables, slot_mappings, block_size)
