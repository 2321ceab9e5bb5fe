"""Persistent rows: what the runner remembers of each live sequence between steps.

The model runner adds, extends and drops rows as the step plan says; `input_batch` gathers each step's inputs from
them. A row holds token ids, the block table and the sampling state of one sequence and is wiped when it goes, so
that nothing of one request is left for another. It knows nothing of the scheduler or of tensors.
"""

import numpy as np

from quire.protocol.step import BlockCopy, NewSequence, ScheduledSequence
from quire.sampling.state import SamplingState


class RowTable:
    """Dense arrays with one row per live sequence.

    Attributes:
        token_ids: int32 [num_rows, max_model_len + 1], prompt then output.
        block_tables: int32 [num_rows, max_blocks].
        num_tokens, num_prompt_tokens, num_computed, num_blocks: int64 [num_rows].
        states: the sampling state of each row, None where the row is free.

    The arrays come from zeroed virtual memory, so a row's far end costs nothing until it is written.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # One more than the context: the last token sampled is remembered although it is never computed.
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((num_rows, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.states: list[SamplingState | None] = [None] * num_rows
        self._row_of: dict[int, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._row_of

    def row(self, sequence_id: int) -> int:
        """The row that holds a live sequence."""
        return self._row_of[sequence_id]

    def state(self, sequence_id: int) -> SamplingState:
        """The sampling state of a live sequence."""
        state = self.states[self._row_of[sequence_id]]
        assert state is not None
        return state

    def add(self, sequence: NewSequence, state: SamplingState) -> int:
        """Take a free row for a sequence that is not held yet; returns the row."""
        assert sequence.sequence_id not in self._row_of, "a live sequence was announced as new"
        num_prompt, num_output = len(sequence.prompt_token_ids), len(sequence.output_token_ids)
        row = self._free.pop()
        self._row_of[sequence.sequence_id] = row
        self.token_ids[row, :num_prompt] = sequence.prompt_token_ids
        self.token_ids[row, num_prompt : num_prompt + num_output] = sequence.output_token_ids
        self.num_tokens[row] = num_prompt + num_output
        self.num_prompt_tokens[row] = num_prompt
        self.num_computed[row] = sequence.num_computed_tokens
        self.block_tables[row, : len(sequence.block_ids)] = sequence.block_ids
        self.num_blocks[row] = len(sequence.block_ids)
        self.states[row] = state
        return row

    def remove(self, sequence_id: int) -> None:
        """Wipe and free the row of a sequence that ended or was preempted."""
        row = self._row_of.pop(sequence_id)
        self.token_ids[row, : self.num_tokens[row]] = 0
        self.block_tables[row, : self.num_blocks[row]] = 0
        for column in (self.num_tokens, self.num_prompt_tokens, self.num_computed, self.num_blocks):
            column[row] = 0
        self.states[row] = None
        self._free.append(row)

    def append_blocks(self, scheduled: ScheduledSequence) -> None:
        """Append the blocks that a step brings to its row's block table."""
        if scheduled.new_block_ids:
            row = self._row_of[scheduled.sequence_id]
            end = self.num_blocks[row] + len(scheduled.new_block_ids)
            self.block_tables[row, self.num_blocks[row] : end] = scheduled.new_block_ids
            self.num_blocks[row] = end

    def replace_block(self, copy: BlockCopy) -> None:
        """Point a held row's table at the private copy of a block that it shared."""
        row = self._row_of.get(copy.sequence_id)
        if row is not None:
            self.block_tables[row, copy.block_index] = copy.destination

    def append_token(self, sequence_id: int, token_id: int) -> None:
        """Append a sampled token, to be computed in the sequence's next step."""
        row = self._row_of[sequence_id]
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1
        self.state(sequence_id).append(token_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows and free list agree and every free row is wiped."""
        used = set(self._row_of.values())
        assert len(used) == len(self._row_of), "two sequences share a row"
        assert used.isdisjoint(self._free), "a used row is on the free list"
        assert len(used) + len(self._free) == len(self.states), "a row is lost"
        for row in self._free:
            assert self.states[row] is None, f"free row {row} keeps a sampling state"
            assert not self.num_tokens[row], f"free row {row} keeps a token count"
            assert not self.num_blocks[row], f"free row {row} keeps a block count"
            assert not self.token_ids[row].any(), f"free row {row} keeps tokens"
            assert not self.block_tables[row].any(), f"free row {row} keeps blocks"
