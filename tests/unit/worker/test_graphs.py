"""Captured steps: padded to tables of sizes, with rows that read and write nothing, and the answers of steps as is."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionBatch
from quire.attention.step import AdapterBatch, Step
from quire.worker.devices.graphs import CONTEXTS, SIZES, TOKENS, GraphedModel, fitting, table
from tests.host_stream import HostStream

BLOCK_SIZE = 16


class Built(NamedTuple):
    """What a backend makes of a batch."""

    batch: AttentionBatch


class Model:
    """Hidden states that tell all that a step was told of a token; notes each batch that it was run with."""

    vocab_size = 7
    cache_layers: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.seen: list[AttentionBatch] = []

    def __call__(self, ids: Tensor, step: Step) -> Tensor:
        batch: AttentionBatch = step.attention[0].batch
        self.seen.append(AttentionBatch(*(x.clone() if isinstance(x, Tensor) else x for x in vars(batch).values())))
        told = torch.zeros(len(ids), 5)
        told[:, 0], told[:, 1], told[:, 2] = ids, step.positions, batch.slot_mapping
        for start, end, length, blocks in zip(
            batch.query_start_loc[:-1], batch.query_start_loc[1:], batch.seq_lens, batch.block_tables, strict=True
        ):
            told[start:end, 3], told[start:end, 4] = length, blocks.sum()
        return told

    def compute_logits(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        return hidden + 1


def batch_of(lengths: list[int], num_blocks: int, num_tokens: int = 1) -> AttentionBatch:
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * num_tokens
    tables = torch.arange(len(lengths) * num_blocks, dtype=torch.int32).view(len(lengths), num_blocks)
    slots = torch.arange(len(lengths) * num_tokens, dtype=torch.int32) + 100
    return AttentionBatch(starts, torch.tensor(lengths, dtype=torch.int32), tables, slots, BLOCK_SIZE)


@pytest.fixture
def stream() -> HostStream:
    return HostStream()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def graphed(stream: HostStream, model: Model) -> GraphedModel:
    last = torch.tensor([50, 51, 52, 53], dtype=torch.int32)
    made = GraphedModel(model, stream, Built, last, max_size=12, max_context=5000)  # type: ignore[arg-type]
    made.reserve()
    return made


def step_of(batch: AttentionBatch, **more: Any) -> tuple[Tensor, Step]:
    size = len(batch.slot_mapping)
    positions = torch.arange(size, dtype=torch.int32) + 7
    return torch.arange(size, dtype=torch.int32) + 3, Step(positions, (), [Built(batch)], **more)


def as_is(batch: AttentionBatch) -> Tensor:
    ids, step = step_of(batch)
    return Model()(ids, Step(step.positions, (), [Built(batch)]))


def test_tables() -> None:
    assert list(SIZES) == sorted(set(SIZES))
    assert table(SIZES, 6) == (1, 2, 4, 6)
    assert table(CONTEXTS, 1024) == (1024,)
    assert [fitting((1, 2, 4, 6), n) for n in range(1, 7)] == [1, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 11, 12])
def test_a_padded_step_is_the_step(graphed: GraphedModel, model: Model, stream: HostStream, size: int) -> None:
    batch = batch_of([20 + i for i in range(size)], num_blocks=3)
    ids, step = step_of(batch)
    for _ in range(2):
        assert torch.equal(graphed(ids, step), as_is(batch))
    assert stream.num_captured == 1
    padded = model.seen[-1]
    rows = fitting(table(SIZES, 12), size)
    assert padded.block_tables.shape == (rows, 1024 // BLOCK_SIZE)
    assert padded.seq_lens.tolist() == [*batch.seq_lens.tolist(), *[0] * (rows - size)]
    assert padded.slot_mapping.tolist() == [*batch.slot_mapping.tolist(), *[-1] * (rows - size)]


def test_rows_of_an_earlier_step_are_none_of_the_next(graphed: GraphedModel, model: Model) -> None:
    for size in (8, 5, 7, 6):
        batch = batch_of([30] * size, num_blocks=2)
        assert torch.equal(graphed(*step_of(batch)), as_is(batch))
        assert model.seen[-1].seq_lens.tolist() == [30] * size + [0] * (8 - size)
        assert model.seen[-1].slot_mapping[size:].tolist() == [-1] * (8 - size)


@pytest.mark.parametrize("number", range(1, 7))
def test_an_interrupted_step_leaves_nothing_to_the_next(
    graphed: GraphedModel, model: Model, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its slots are others' by then: a Ctrl-C comes wherever it wants, here at one of the copies into a graph."""
    graphed(*step_of(batch_of([30] * 7, num_blocks=2)))
    copy, calls = Tensor.copy_, list[None]()

    def interrupted(self: Tensor, *args: Any) -> Tensor:
        calls.append(None)
        if len(calls) == number:
            raise KeyboardInterrupt
        return copy(self, *args)

    for size in (8, 5):
        ids, step = step_of(batch_of([40] * size, num_blocks=2))
        calls.clear()
        monkeypatch.setattr(Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            graphed(ids, step)
        monkeypatch.setattr(Tensor, "copy_", copy)
        batch = batch_of([30] * 6, num_blocks=2)
        assert torch.equal(graphed(*step_of(batch)), as_is(batch))
        assert model.seen[-1].seq_lens.tolist() == [30] * 6 + [0] * 2
        assert model.seen[-1].slot_mapping[6:].tolist() == [-1] * 2


def test_a_graph_for_each_size_and_context(graphed: GraphedModel, stream: HostStream) -> None:
    for size, num_blocks, graphs in ((3, 2, 1), (4, 64, 1), (4, 65, 2), (5, 65, 3), (8, 256, 3), (8, 300, 4)):
        graphed(*step_of(batch_of([num_blocks * BLOCK_SIZE] * size, num_blocks)))
        assert stream.num_captured == graphs, (size, num_blocks)


@pytest.mark.parametrize(("num", "rows"), [(1, 1), (2, 2), (3, 12), (12, 12)])
def test_a_padded_step_of_prompts_is_the_step(
    graphed: GraphedModel, model: Model, stream: HostStream, num: int, rows: int
) -> None:
    for num_tokens in (7, 6, 8):
        batch = batch_of([20 + i for i in range(num)], 3, num_tokens)
        assert torch.equal(graphed(*step_of(batch)), as_is(batch))
        padded, size = model.seen[-1], num * num_tokens
        assert len(padded.slot_mapping) == fitting(TOKENS, size)
        assert padded.slot_mapping[size:].eq(-1).all()
        assert padded.query_start_loc.tolist() == [*batch.query_start_loc.tolist(), *[size] * (rows - num)]
        assert padded.seq_lens.tolist() == [*batch.seq_lens.tolist(), *[0] * (rows - num)]
    assert stream.num_captured == len({fitting(TOKENS, num * n) for n in (6, 7, 8)})


def test_as_many_tokens_as_sequences_are_not_one_each(stream: HostStream, model: Model) -> None:
    last = torch.zeros(64, dtype=torch.int32)
    made = GraphedModel(model, stream, Built, last, max_size=TOKENS[1], max_context=64)  # type: ignore[arg-type]
    made.reserve()
    for lengths, num_tokens in (
        ([20] * TOKENS[1], 1),
        ([20] * 5, 6),
        ([20] * TOKENS[1], 1),
    ):  # padded to as many of both
        batch = batch_of(lengths, 2, num_tokens)
        assert torch.equal(made(*step_of(batch)), as_is(batch))
    assert stream.num_captured == 2


def test_a_step_of_prompts_after_one_of_more(graphed: GraphedModel, model: Model) -> None:
    for lengths in ([30] * 9, [40] * 5, [20] * 7, [50] * 3):
        batch = batch_of(lengths, 3, 64 // len(lengths))
        assert torch.equal(graphed(*step_of(batch)), as_is(batch))
        assert model.seen[-1].seq_lens.tolist() == lengths + [0] * (12 - len(lengths))


def test_what_no_graph_serves_runs_as_it_is(graphed: GraphedModel, stream: HostStream) -> None:
    prompts = batch_of([2000, 2000], num_blocks=125, num_tokens=TOKENS[-1] // 2 + 1)
    assert torch.equal(graphed(*step_of(prompts)), as_is(prompts))
    one = batch_of([20], 2)
    for more in ({"adapters": AdapterBatch(torch.zeros(1))}, {"incoming": torch.zeros(1, 1)}):
        graphed(*step_of(one, **more))
    for num_tokens in (1, 2):
        graphed(*step_of(batch_of([20] * 13, 2, num_tokens)))  # more than the largest graph
    assert stream.num_captured == 0


def test_no_graph_before_there_is_room(stream: HostStream, model: Model) -> None:
    made = GraphedModel(model, stream, Built, torch.zeros(1, dtype=torch.int32), max_size=4, max_context=64)  # type: ignore[arg-type]
    made(*step_of(batch_of([20], 2)))
    assert stream.num_captured == 0
    made.reserve()
    made(*step_of(batch_of([20], 2)))
    assert stream.num_captured == 1


def test_eager_where_asked_for(stream: HostStream, model: Model) -> None:
    made = GraphedModel(model, stream, Built, torch.zeros(1, dtype=torch.int32), max_size=0, max_context=64)  # type: ignore[arg-type]
    made.reserve()
    made(*step_of(batch_of([20], 2)))
    assert stream.num_captured == 0


@pytest.mark.parametrize("num_tokens", [1, 2, TOKENS[-1]], ids=["decoding", "prompts", "as it is"])
def test_tokens_that_the_host_has_not_heard_of(graphed: GraphedModel, num_tokens: int) -> None:
    batch = batch_of([20, 20], 2, num_tokens)
    ids, step = step_of(batch)
    ids[1], ids[0] = -1 - 2, -1
    assert graphed(ids, step)[:2, 0].tolist() == [50, 52]
