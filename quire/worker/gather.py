"""A step's input arrays, gathered from the persistent rows by the compiled library (csrc/step_inputs.cpp), or numpy.

The model runner calls `gather` once a step. The arrays are made anew each time: what a device may still be reading
is never written again. It knows the rows and the plan, and nothing of models, devices or sampling.
"""

from array import array
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.ops.native.library import library, loaded_library
from quire.ops.native.structs import c_struct
from quire.protocol.step import ScheduledSequence
from quire.worker.rows import Row, RowTable

INT = np.int32  # of all that kernels index by
_NO_TAIL = np.iinfo(INT).max

Ints = npt.NDArray[INT]
Numbers = Sequence[int]


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
    num_blocks = -(-max(map(add, first, counts)) // table.block_size)
    assert num_blocks <= table.block_tables.shape[2], "a step goes on where no block can be"
    make = _in_numpy if library() is None else _natively
    return StepBatch(rows, [*accumulate(counts)], make([row.index for row in rows], first, counts, num_blocks, table))


def _natively(places: Numbers, first: Numbers, counts: Numbers, num_blocks: int, table: RowTable) -> StepArrays:
    """The arrays, in one piece of memory: a call of numpy for each would take most of a step's time here."""
    num_rows, num_tokens, (num_groups, table_rows, width) = len(places), sum(counts), table.block_tables.shape
    of_tokens, of_rows = (2 + num_groups) * num_tokens, 2 * num_rows + 1
    numbers = array("q", [*places, *first, *counts])
    out = array("i", bytes(4 * (of_tokens + of_rows + num_groups * num_rows * num_blocks)))
    inputs = c_struct("StepInputs")(
        token_ids=table.addresses[0], token_stride=table.token_ids.shape[1], block_tables=table.addresses[1],
        table_stride=width, group_stride=table_rows * width, num_groups=num_groups, block_size=table.block_size,
        num_rows=num_rows, num_tokens=num_tokens, rows=numbers.buffer_info()[0], max_blocks=num_blocks,
        out=out.buffer_info()[0],
    )  # fmt: skip
    loaded_library().quire_step_inputs(addressof(inputs))
    made = np.frombuffer(out, INT)
    input_ids, positions, *slots = made[:of_tokens].reshape(-1, num_tokens)
    starts, lengths = made[of_tokens:][: num_rows + 1], made[of_tokens + num_rows + 1 :][:num_rows]
    tables = [*made[of_tokens + of_rows :].reshape(num_groups, num_rows, num_blocks)]
    return StepArrays(input_ids, positions, starts, lengths, tables, slots, table.block_size)


def _in_numpy(places: Numbers, first: Numbers, counts: Numbers, num_blocks: int, table: RowTable) -> StepArrays:
    """The same without a compiled library."""
    indices, starts, lengths = np.array(places), np.array(first, INT), np.array(counts, INT)
    query_start_loc = np.cumsum([0, *counts], dtype=INT)
    # Token t of sequence s: position = starts[s] + (t - query_start_loc[s]).
    positions = np.arange(query_start_loc[-1], dtype=INT) + np.repeat(starts - query_start_loc[:-1], lengths)
    row_of_token = np.repeat(indices, lengths)
    tables, slots = [held[indices, :num_blocks] for held in table.block_tables], table.slots(row_of_token, positions)
    input_ids, seq_lens = table.token_ids[row_of_token, positions], starts + lengths
    return StepArrays(input_ids, positions, query_start_loc, seq_lens, tables, slots, table.block_size)


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
