"""Persistent rows: what the runner remembers of each live sequence between steps.

The model runner carries out a plan's rows here; `gather` makes each step's inputs from them. A row holds the token
ids, the block tables and the sampling state of one sequence and is wiped when it goes, so that nothing of one request
is left for another. It knows nothing of the scheduler or of tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config.draft_tree import DraftTree
from quire.protocol.cache import CacheLayout
from quire.protocol.requests import NewRequest
from quire.protocol.step import Failure, Fork, NewSequence, ScheduledSequence
from quire.sampling.state import SamplingState
from quire.sampling.tokens import SequenceTokens
from quire.speculative.base import DraftedSequence


class TreeShape:
    """A tree of drafts, and what gathers its nodes; the last entry of either array is for what is no node.

    Attributes:
        depths: int32 [nodes + 1], 0 for no node.
        ancestors: int32 [nodes + 1, depth], each node's path, itself included; then zeros.
    """

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree
        self.depths = np.array([*tree.depths, 0], np.int32)
        self.ancestors = np.zeros((len(tree) + 1, tree.max_depth), np.int32)
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            self.ancestors[node] = self.ancestors[parent]  # of the newest token: the last entry, which is all zeros
            self.ancestors[node, depth - 1] = node


@dataclass(slots=True, eq=False)
class Row:
    """One live sequence.

    Attributes:
        index: of the row in the table's arrays.
        tokens: its tokens, a view of the table's.
        draws_there: the device draws its tokens, all but those under a grammar or among several samples.
        draws_ahead: nothing about them ever needs the host.
        num_computed: tokens whose keys and values are in the cache.
        num_blocks: length of its block table, by KV group.
        state: its sampling state, of a request that samples.
        failure: why it has no sampling state of its own; reported when it is sampled.
        drafted: what a proposer knows of it, where one drafts for it.
    """

    index: int
    sequence_id: int
    request: NewRequest
    sequence_index: int
    tokens: SequenceTokens
    num_blocks: list[int]
    num_computed: int = 0
    draws_there: bool = False
    draws_ahead: bool = False
    state: SamplingState | None = None
    failure: Failure | None = None
    drafted: DraftedSequence | None = None

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens that were drawn."""
        for token_id in token_ids:
            self.tokens.append(token_id)

    @property
    def end(self) -> int:
        """Index after all that its tokens' array may hold: tokens, drafts, names of tokens that only a device knows."""
        return max(self.tokens.num + self.tokens.num_drafts, self.num_computed + 1)

    @property
    def prompt_logprobs(self) -> int | None:
        """How many logprobs its request wants at each prompt token; None: not asked for."""
        return self.request.task.params.prompt_logprobs


class RowTable:
    """Rows of the live sequences, and their tokens and blocks in dense arrays.

    Attributes:
        token_ids: int32 [num_rows, max_model_len + 1 + max_drafts]; see `SequenceTokens`.
        block_tables: int32 [num_groups, num_rows, max_blocks].
        rows: by the sequence's id.
        addresses: of the two, for the compiled library.
        requests: what sequences refer to, by request id.
        tree: the shape of drafts, where they are no chain.
        num_with_prompt_logprobs: rows whose request asks for prompt logprobs.

    The arrays come from zeroed virtual memory, so a row's far end costs nothing until it is written.
    """

    def __init__(self, num_rows: int, layout: CacheLayout, max_drafts: int = 0, tree: DraftTree | None = None) -> None:
        self.block_size, self._max_tokens = layout.block_size, layout.max_model_len
        self.tree = None if tree is None else TreeShape(tree)
        # One more than the context: the last token sampled is remembered although it is never computed.
        self._tokens_shape = num_rows, self._max_tokens + max_drafts + 1
        self._blocks_shape = len(layout.groups), num_rows, -(-(self._max_tokens + max_drafts) // layout.block_size)
        self.clear()

    def add(self, sequence: NewSequence) -> Row:
        """Take a free row for a sequence that is not held yet, without a sampling state."""
        request = self.requests[sequence.request_id]
        prompt, output = request.prompt_token_ids, sequence.output_token_ids
        row = self._take(sequence.sequence_id, request, sequence.sequence_index, len(prompt) + len(output))
        row.tokens.ids[: len(prompt)] = prompt
        row.tokens.ids[len(prompt) : len(prompt) + len(output)] = output
        row.num_computed = sequence.num_computed_tokens
        self._append_blocks(row, sequence.block_ids)
        return row

    def fork(self, fork: Fork) -> Row:
        """Copy a row's first tokens and their blocks to a free one, which goes on with a token of its own."""
        parent = self.rows[fork.parent_id]
        num = fork.num_tokens
        row = self._take(fork.sequence_id, parent.request, fork.sequence_index, num)
        row.tokens.ids[:num] = parent.tokens.ids[:num]
        row.num_computed = num
        held = [min(-(-num // self.block_size), count) for count in parent.num_blocks]
        self._append_blocks(row, [self.block_tables[g, parent.index, :n] for g, n in enumerate(held)])
        row.tokens.append(fork.token_id)
        return row

    def remove(self, sequence_id: int) -> None:
        """Wipe and free the row of a sequence that ended or was preempted; one that has none is left alone."""
        if (row := self.rows.pop(sequence_id, None)) is None:
            return
        row.tokens.ids[: row.end] = 0
        for group, count in enumerate(row.num_blocks):
            self.block_tables[group, row.index, :count] = 0
        if row.prompt_logprobs is not None:
            self.num_with_prompt_logprobs -= 1
        self._free.append(row.index)

    def clear(self) -> None:
        """Wipe all rows and forget all requests; relies on nothing that an interrupt may have left half done."""
        self.token_ids = np.zeros(self._tokens_shape, np.int32)
        self.block_tables = np.zeros(self._blocks_shape, np.int32)
        self.addresses = self.token_ids.ctypes.data, self.block_tables.ctypes.data
        self.requests: dict[str, NewRequest] = {}
        self.num_with_prompt_logprobs = 0
        self.rows: dict[int, Row] = {}
        self._free = list(range(len(self.token_ids) - 1, -1, -1))

    def advance(self, scheduled: ScheduledSequence) -> None:
        """Carry out what a plan says of a row before it is computed: blocks, edits of them, tokens from above."""
        row = self.rows[scheduled.sequence_id]
        if scheduled.new_block_ids:
            self._append_blocks(row, scheduled.new_block_ids)
        for group, place, block in scheduled.edits:
            self.block_tables[group, row.index, place] = block
        if scheduled.chosen_token_id >= 0:
            row.tokens.append(scheduled.chosen_token_id)
        if scheduled.draft_token_ids:
            row.tokens.set_drafts(scheduled.draft_token_ids)

    def num_slots(self, sequence_id: int) -> int:
        """Positions of a sequence that have a place in the KV cache; a last block may reach beyond those there are."""
        return min(self._max_tokens, min(self.rows[sequence_id].num_blocks) * self.block_size)

    def slots(self, rows: npt.NDArray[Any], positions: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """Cache slots of positions of rows, by KV group."""
        block, offset = np.divmod(positions, np.int32(self.block_size))
        return [tables[rows, block] * np.int32(self.block_size) + offset for tables in self.block_tables]

    def check_integrity(self, live_sequence_ids: Sequence[int] | None = None) -> None:
        """Raise AssertionError unless rows and free list agree, every free row is wiped, and all live ones are known.

        `live_sequence_ids`: the sequences that should have a row, where the caller knows them.
        """
        used = {row.index for row in self.rows.values()}
        assert len(used) == len(self.rows), "two sequences share a row"
        assert used.isdisjoint(self._free), "a used row is on the free list"
        assert len(used) + len(self._free) == len(self.token_ids), "a row is lost"
        for row in self.rows.values():
            assert not self.token_ids[row.index, row.end :].any(), f"row {row.index} has tokens beyond its end"
        is_filled = np.any(self.token_ids, axis=1) | np.any(self.block_tables, axis=(0, 2))
        for index in self._free:
            assert not is_filled[index], f"free row {index} keeps tokens or blocks"
        if live_sequence_ids is not None:
            held, live = set(self.rows), set(live_sequence_ids)
            assert held == live, f"rows without a sequence: {sorted(held - live)}; without a row: {sorted(live - held)}"

    def _take(self, sequence_id: int, request: NewRequest, sequence_index: int, num_tokens: int) -> Row:
        assert sequence_id not in self.rows, "a live sequence was announced as new"
        index = self._free.pop()
        tokens = SequenceTokens(self.token_ids[index], len(request.prompt_token_ids), num_tokens, request.num_virtual)
        num_blocks = [0] * len(self.block_tables)
        row = self.rows[sequence_id] = Row(index, sequence_id, request, sequence_index, tokens, num_blocks)
        if row.prompt_logprobs is not None:
            self.num_with_prompt_logprobs += 1
        return row

    def _append_blocks(self, row: Row, block_ids: Sequence[Sequence[int] | np.ndarray]) -> None:
        for group, blocks in enumerate(block_ids):
            if len(blocks):
                start = row.num_blocks[group]
                row.num_blocks[group] = start + len(blocks)
                self.block_tables[group, row.index, start : start + len(blocks)] = blocks
