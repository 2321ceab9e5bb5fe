"""Persistent rows against a naive twin: a dict of plain lists."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from quire import SamplingParams
from quire.protocol.step import BlockCopy, NewSequence, ScheduledSequence, StepPlan
from quire.sampling.state import SamplingState
from quire.worker.gather import gather
from quire.worker.rows import RowTable

NUM_ROWS, MAX_LEN, BLOCK_SIZE, VOCAB = 4, 24, 4, 50
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


class RowsMachine(RuleBasedStateMachine):
    """Adds, steps, copies and removes sequences; the twin holds token lists and block lists."""

    sequences = Bundle("sequences")

    @initialize()
    def start(self) -> None:
        self.table = RowTable(NUM_ROWS, MAX_LEN, BLOCK_SIZE)
        self.twin: dict[int, dict] = {}
        self.next_id = 0
        self.next_block = 1

    def blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    @precondition(lambda self: len(self.twin) < NUM_ROWS)
    @rule(target=sequences, prompt=tokens, output=st.lists(st.integers(0, VOCAB - 1), max_size=5))
    def add(self, prompt: list[int], output: list[int]) -> int:
        sequence_id, self.next_id = self.next_id, self.next_id + 1
        params = SamplingParams()
        blocks = self.blocks(-(-len(prompt + output) // BLOCK_SIZE))
        new = NewSequence(
            sequence_id=sequence_id,
            request_id=f"r{sequence_id}",
            sequence_index=0,
            prompt_token_ids=prompt,
            output_token_ids=output,
            sampling_params=params,
            seed=1,
            stop_token_ids=frozenset(),
            bad_words_token_ids=[],
            block_ids=blocks,
            num_computed_tokens=0,
        )
        state = SamplingState(
            params,
            prompt,
            seed=1,
            sequence_index=0,
            vocab_size=VOCAB,
            stop_token_ids=frozenset(),
            bad_words_token_ids=[],
            output_token_ids=output,
        )
        self.table.add(new, state)
        self.twin[sequence_id] = {"tokens": prompt + output, "blocks": list(blocks), "computed": 0}
        return sequence_id

    @rule(chosen=sequences, chunk=st.integers(1, 9), token=st.integers(0, VOCAB - 1))
    def step(self, chosen: int, chunk: int, token: int) -> None:
        twin = self.twin.get(chosen)
        if twin is None or len(twin["tokens"]) >= MAX_LEN:
            return
        count = min(chunk, len(twin["tokens"]) - twin["computed"])
        ends = twin["computed"] + count == len(twin["tokens"])
        needed = -(-(twin["computed"] + count) // BLOCK_SIZE)
        fresh = self.blocks(max(0, needed - len(twin["blocks"])))
        twin["blocks"] += fresh
        scheduled = ScheduledSequence(chosen, count, int(ends), fresh)
        self.table.append_blocks(scheduled)
        plan = StepPlan(step_id=0, removed_sequence_ids=[], new_sequences=[], copies=[], scheduled=[scheduled])
        batch = gather(plan, self.table)
        span = range(twin["computed"], twin["computed"] + count)
        assert batch.positions.tolist() == list(span)
        assert batch.input_ids.tolist() == [twin["tokens"][p] for p in span]
        slots = [twin["blocks"][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
        assert batch.attention.slot_mapping.tolist() == slots
        assert batch.attention.seq_lens.tolist() == [twin["computed"] + count]
        assert batch.attention.block_tables[0].tolist() == twin["blocks"][:needed]
        assert batch.sampled_tokens.tolist() == ([count - 1] if ends else [])
        twin["computed"] += count
        self.table.num_computed[self.table.row(chosen)] += count
        if ends:
            self.table.append_token(chosen, token)
            twin["tokens"].append(token)

    @rule(chosen=sequences, place=st.integers(0, 5))
    def copy_on_write(self, chosen: int, place: int) -> None:
        twin = self.twin.get(chosen)
        if twin is not None and place < len(twin["blocks"]):
            fresh = self.blocks(1)[0]
            self.table.replace_block(BlockCopy(chosen, place, twin["blocks"][place], fresh))
            twin["blocks"][place] = fresh

    @rule(chosen=consumes(sequences))
    def remove(self, chosen: int) -> None:
        if self.twin.pop(chosen, None) is not None:
            self.table.remove(chosen)
            assert chosen not in self.table

    @invariant()
    def agrees(self) -> None:
        self.table.check_integrity()
        assert len(self.table) == len(self.twin)
        for sequence_id, twin in self.twin.items():
            row = self.table.row(sequence_id)
            assert self.table.token_ids[row, : self.table.num_tokens[row]].tolist() == twin["tokens"]
            assert self.table.block_tables[row, : self.table.num_blocks[row]].tolist() == twin["blocks"]
            num_prompt = int(self.table.num_prompt_tokens[row])
            assert list(self.table.state(sequence_id).output_token_ids) == twin["tokens"][num_prompt:]


RowsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestRows = RowsMachine.TestCase


def test_integrity_check_sees_a_dirty_row() -> None:
    table = RowTable(NUM_ROWS, MAX_LEN, BLOCK_SIZE)
    table.token_ids[2, 3] = 7
    with pytest.raises(AssertionError, match="row 2 keeps tokens"):
        table.check_integrity()
