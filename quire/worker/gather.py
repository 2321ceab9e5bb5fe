"""A step's input tensors, gathered from the persistent rows with a handful of numpy calls.

The model runner calls `gather` once a step. The arrays are made anew each time: what a device may still be reading
is never written again. It knows the rows and the plan, and nothing of models or sampling.
"""

from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.base import AttentionBatch
from quire.protocol.step import StepPlan
from quire.worker.rows import RowTable


@dataclass(frozen=True)
class InputBatch:
    """Inputs of one step: S sequences with T tokens in all, R of the sequences being sampled.

    Attributes:
        input_ids, positions: int64 [T].
        attention: where each sequence's rows, keys and values lie.
        rows: the persistent row of each sequence, int64 [S].
        starts: position of the first token of each sequence in this step, int64 [S].
        query_start_loc: int64 [S + 1], the numpy twin of ``attention.query_start_loc``.
        sampled: indices into the plan's scheduled list, of the sequences being sampled; R of them.
        sampled_tokens: int64 [R], ascending: index in [0, T) of each sampled sequence's last token.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    rows: np.ndarray
    starts: np.ndarray
    query_start_loc: np.ndarray
    sampled: list[int]
    sampled_tokens: np.ndarray


def gather(plan: StepPlan, table: RowTable) -> InputBatch:
    """Gather the inputs of a step whose rows are up to date with the plan."""
    rows = np.array([table.row(s.sequence_id) for s in plan.scheduled], np.int64)
    counts = [s.num_new_tokens for s in plan.scheduled]
    starts = table.num_computed[rows]
    if max(counts) == 1:  # all decode: most steps are this, and each call spared counts in a small model's step
        query_start_loc = np.arange(len(rows) + 1)
        positions, row_of_token, seq_lens = starts, rows, starts + 1
    else:
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start_loc[1:])
        # Token t of sequence s: position = starts[s] + (t - query_start_loc[s]).
        positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], counts)
        row_of_token = np.repeat(rows, counts)
        seq_lens = starts + counts
    block_size = table.block_size
    block, offset = np.divmod(positions, block_size)
    slots = table.block_tables[row_of_token, block].astype(np.int64)
    slots *= block_size
    slots += offset
    num_blocks = -(-int(seq_lens.max()) // block_size)
    sampled = [i for i, s in enumerate(plan.scheduled) if s.num_samples]
    return InputBatch(
        input_ids=torch.from_numpy(table.token_ids[row_of_token, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        attention=AttentionBatch(
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=torch.from_numpy(table.block_tables[rows, :num_blocks].astype(np.int64)),
            slot_mapping=torch.from_numpy(slots),
            block_size=block_size,
        ),
        rows=rows,
        starts=starts,
        query_start_loc=query_start_loc,
        sampled=sampled,
        sampled_tokens=query_start_loc[1:][sampled] - 1,
    )
