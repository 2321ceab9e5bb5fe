"""Persistent rows against a naive twin: a dict of plain lists, by KV group where there are several."""

import copy

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from quire import SamplingParams
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import Fork, NewSequence, Sampling, ScheduledSequence
from quire.worker.gather import gather
from quire.worker.rows import RowTable

NUM_ROWS, MAX_LEN, BLOCK_SIZE, VOCAB, GROUPS, DRAFTS = 5, 24, 4, 50, 2, 3
LAYOUT = CacheLayout(block_size=BLOCK_SIZE, groups=[CacheGroup([0])] * GROUPS, num_blocks=[], max_model_len=MAX_LEN)
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


class RowsMachine(RuleBasedStateMachine):
    """Adds, steps, forks, copies, drafts for and removes sequences; the twin holds token lists and block lists."""

    sequences = Bundle("sequences")

    @initialize()
    def start(self) -> None:
        self.table = RowTable(NUM_ROWS, LAYOUT, DRAFTS)
        self.twin: dict[int, dict] = {}
        self.next_id = 0
        self.next_block = 1

    def blocks(self, count: int) -> list[list[int]]:
        self.next_block += count * GROUPS
        first = self.next_block - count * GROUPS
        return [list(range(first + g * count, first + (g + 1) * count)) for g in range(GROUPS)]

    @precondition(lambda self: len(self.twin) < NUM_ROWS)
    @rule(target=sequences, prompt=tokens, output=st.lists(st.integers(0, VOCAB - 1), max_size=5))
    def add(self, prompt: list[int], output: list[int]) -> int:
        sequence_id, self.next_id = self.next_id, self.next_id + 1
        task = SamplingTask(
            params=SamplingParams(prompt_logprobs=1 if sequence_id % 3 == 0 else None),
            max_tokens=9,
            stop_token_ids=frozenset(),
            seed=1,
        )
        request = NewRequest(request_id=f"r{sequence_id}", prompt_token_ids=prompt, task=task)
        self.table.requests[request.request_id] = request
        blocks = self.blocks(-(-len(prompt + output) // BLOCK_SIZE))
        self.table.add(NewSequence(sequence_id, request.request_id, 0, output, blocks, 0))
        self.twin[sequence_id] = {
            "prompt": prompt, "tokens": prompt + output, "drafts": [], "blocks": copy.deepcopy(blocks), "computed": 0,
            "asks": sequence_id % 3 == 0,
        }  # fmt: skip
        return sequence_id

    @rule(chosen=sequences, chunk=st.integers(1, 9), token=st.integers(0, VOCAB - 1), drafts=st.integers(0, DRAFTS))
    def step(self, chosen: int, chunk: int, token: int, drafts: int) -> None:
        twin = self.twin.get(chosen)
        if twin is None or len(twin["tokens"]) >= MAX_LEN:
            return
        count = min(chunk, len(twin["tokens"]) - twin["computed"])
        ends = twin["computed"] + count == len(twin["tokens"])
        num_drafts = min(drafts, len(twin["drafts"])) if ends else 0
        end = twin["computed"] + count + num_drafts
        needed = -(-end // BLOCK_SIZE)
        fresh = self.blocks(max(0, needed - len(twin["blocks"][0])))
        for held, more in zip(twin["blocks"], fresh, strict=True):
            held += more
        sampling = Sampling.DRAW if ends else Sampling.NONE
        scheduled = ScheduledSequence(
            chosen, count + num_drafts, sampling, 1, fresh if fresh[0] else [], num_drafts=num_drafts
        )
        self.table.advance(scheduled)
        batch = gather([scheduled], self.table)
        span = range(twin["computed"], end)
        assert batch.arrays.positions.tolist() == list(span)
        assert batch.arrays.input_ids.tolist() == [(twin["tokens"] + twin["drafts"])[p] for p in span]
        for group, held in enumerate(twin["blocks"]):
            slots = [held[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
            assert batch.arrays.slot_mappings[group].tolist() == slots
            assert batch.arrays.block_tables[group][0].tolist() == held[:needed]
        assert batch.arrays.seq_lens.tolist() == [end]
        assert batch.ends == [count + num_drafts]
        row = self.table.rows[chosen]
        row.num_computed += count
        twin["computed"] += count
        if ends:
            row.tokens.append(token)
            row.tokens.set_drafts([])
            twin["tokens"].append(token)
            twin["drafts"] = []

    @precondition(lambda self: self.twin)
    @rule(most=st.integers(1, 3))
    def gather_all(self, most: int) -> None:
        """A batch of several has the arrays of each alone, one after the other."""
        scheduled = []
        for sequence_id, twin in self.twin.items():
            count = min(most, len(twin["tokens"]) - twin["computed"])
            if count > 0 and -(-(twin["computed"] + count) // BLOCK_SIZE) <= len(twin["blocks"][0]):
                scheduled.append(ScheduledSequence(sequence_id, count))
        if scheduled:
            batch = gather(scheduled, self.table)
            alone = [gather([one], self.table).arrays for one in scheduled]
            for name in ("input_ids", "positions", "seq_lens"):
                joined = np.concatenate([getattr(arrays, name) for arrays in alone])
                assert getattr(batch.arrays, name).tolist() == joined.tolist()
                assert getattr(batch.arrays, name).dtype == joined.dtype == np.int32
            for group in range(GROUPS):
                joined = np.concatenate([arrays.slot_mappings[group] for arrays in alone])
                assert batch.arrays.slot_mappings[group].tolist() == joined.tolist()
                for row, arrays in zip(batch.arrays.block_tables[group].tolist(), alone, strict=True):
                    held = arrays.block_tables[group][0].tolist()
                    assert row[: len(held)] == held
            assert batch.ends == np.cumsum([one.num_new_tokens for one in scheduled]).tolist()
            assert batch.arrays.query_start_loc.tolist() == [0, *batch.ends]

    @rule(chosen=sequences, drafts=st.lists(st.integers(0, VOCAB - 1), max_size=DRAFTS), above=st.booleans())
    def draft(self, chosen: int, drafts: list[int], above: bool) -> None:
        twin = self.twin.get(chosen)
        if twin is not None and (drafts or not above):
            if above:
                self.table.advance(ScheduledSequence(chosen, 1, num_drafts=len(drafts), draft_token_ids=drafts))
            else:
                self.table.rows[chosen].tokens.set_drafts(drafts)
            twin["drafts"] = list(drafts)

    @precondition(lambda self: len(self.twin) < NUM_ROWS)
    @rule(target=sequences, chosen=sequences, token=st.integers(0, VOCAB - 1))
    def fork(self, chosen: int, token: int) -> int:
        twin = self.twin.get(chosen)
        if twin is None or twin["computed"] < len(twin["prompt"]):
            return -1
        sequence_id, self.next_id = self.next_id, self.next_id + 1
        num = twin["computed"]
        self.table.fork(Fork(sequence_id, chosen, 1, num, token))
        held = -(-num // BLOCK_SIZE)
        child = twin | {"tokens": [*twin["tokens"][:num], token], "blocks": [b[:held] for b in twin["blocks"]]}
        self.twin[sequence_id] = child | {"drafts": []}
        return sequence_id

    @rule(chosen=sequences, place=st.integers(0, 5), group=st.integers(0, GROUPS - 1))
    def copy_on_write(self, chosen: int, place: int, group: int) -> None:
        twin = self.twin.get(chosen)
        if twin is not None and place < len(twin["blocks"][group]):
            fresh = self.blocks(1)[0][0]
            self.table.advance(ScheduledSequence(chosen, 1, edits=[(group, place, fresh)]))
            twin["blocks"][group][place] = fresh

    @rule(chosen=sequences, token=st.integers(0, VOCAB - 1))
    def choose(self, chosen: int, token: int) -> None:
        twin = self.twin.get(chosen)
        if twin is not None and len(twin["tokens"]) < MAX_LEN and not twin["drafts"]:
            self.table.advance(ScheduledSequence(chosen, 1, chosen_token_id=token))
            twin["tokens"].append(token)

    @rule(chosen=consumes(sequences))
    def remove(self, chosen: int) -> None:
        self.twin.pop(chosen, None)
        self.table.remove(chosen)
        assert self.table.rows.get(chosen) is None

    @invariant()
    def agrees(self) -> None:
        self.table.check_integrity(list(self.twin))
        assert self.table.num_with_prompt_logprobs == sum(twin["asks"] for twin in self.twin.values())
        for sequence_id, twin in self.twin.items():
            row = self.table.rows[sequence_id]
            end = row.tokens.num + row.tokens.num_drafts
            assert self.table.token_ids[row.index, :end].tolist() == twin["tokens"] + twin["drafts"]
            for group, blocks in enumerate(twin["blocks"]):
                assert self.table.block_tables[group, row.index, : row.num_blocks[group]].tolist() == blocks
            assert (row.tokens.prompt(), row.num_computed) == (twin["prompt"], twin["computed"])
            assert row.tokens.output() == twin["tokens"][len(twin["prompt"]) :]


RowsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestRows = RowsMachine.TestCase


def test_integrity_check_sees_a_dirty_row() -> None:
    table = RowTable(NUM_ROWS, LAYOUT)
    table.token_ids[2, 3] = 7
    with pytest.raises(AssertionError, match="row 2 keeps tokens"):
        table.check_integrity()
    with pytest.raises(AssertionError, match=r"without a row: \[5\]"):
        RowTable(NUM_ROWS, LAYOUT).check_integrity([5])
