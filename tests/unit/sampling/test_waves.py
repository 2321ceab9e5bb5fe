"""Lanes whose drafts are a tree: what is drawn along it is what is drawn without drafts."""

from typing import Any

import pytest
import torch

from quire import SamplingParams
from quire.config.draft_tree import DraftTree
from quire.sampling import native
from quire.sampling.lanes import Draw, Lane
from quire.sampling.sampler import sample
from quire.sampling.state import Mask, SamplingState, masks_of
from quire.sampling.waves import draw_lanes, sample_ahead
from tests.tokens import tokens_of

VOCAB = 50
TREE = DraftTree.read("[(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)]")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 0},
    {"temperature": 1.0, "top_p": 0.9},
]


def state_of(kind: dict[str, Any], room: int = 12) -> SamplingState:
    tokens = tokens_of([3, 4], [5], room)
    return SamplingState(SamplingParams(**kind), tokens, seed=7, sequence_index=0, vocab_size=VOCAB)


def walk(kind: dict[str, Any], logits: torch.Tensor, places: list[int]) -> tuple[list[int], Any]:
    """Draw at these rows one after another, without drafts."""
    state, drawn, logprobs = state_of(kind), [], []
    for place in places:
        output = sample(logits, [Draw(state, place)])
        drawn += output.token_ids[0]
        logprobs += output.logprobs[0] or []
        state.tokens.append(drawn[-1])
    return drawn, logprobs or None


@pytest.mark.parametrize("kind", KINDS, ids=["greedy", "penalties", "top_p"])
@pytest.mark.parametrize("path", [[], [0], [1, 3], [1, 4, 5], [0, 2]])
@pytest.mark.parametrize("num_drafts", [3, 6])
def test_the_path_that_is_drawn_is_followed(kind: dict[str, Any], path: list[int], num_drafts: int) -> None:
    generator = torch.Generator().manual_seed(len(path) + num_drafts)
    logits = torch.randn(2 + num_drafts + 1, VOCAB, generator=generator) * 2
    seen = [node for node in path if node < num_drafts]
    places = [2, *(3 + node for node in seen)]
    expected, logprobs = walk(kind, logits, places)
    drafts = [
        (expected[depth - 1] + 1 + node) % VOCAB if depth <= len(expected) else 0
        for node, depth in enumerate(TREE.depths)
    ]
    for node, token_id in zip(path, expected, strict=False):
        drafts[node] = token_id
    state = state_of(kind)
    state.tokens.set_drafts(drafts)
    other = state_of(KINDS[0])
    lane, plain = Lane(state, 2, num_drafts=num_drafts), Lane(other, 0)
    lane.use_tree(TREE)
    draw_lanes(logits, [plain, lane])
    # Where the path's end is no leaf of what was computed, its children may be drawn by chance: they are not here.
    assert lane.token_ids == expected
    assert lane.logprobs == logprobs
    assert [lane.first_row + place for place in lane.path] == places
    assert lane.last_row == places[-1]
    assert lane.num_refused == num_drafts - len(seen)
    assert lane.max_accepted == TREE.depths[num_drafts - 1]
    assert state.tokens.output() == [5, *expected]
    assert not state.tokens.num_drafts
    assert not state.tokens.ids[state.tokens.num :].any()
    assert (plain.token_ids, plain.last_row) == (walk(KINDS[0], logits, [0])[0], 0)


def test_masks_are_by_computed_place() -> None:
    logits = torch.zeros(7, VOCAB)
    state = state_of({"temperature": 0})
    state.tokens.set_drafts([10, 11, 12, 13, 14, 15])
    lane = Lane(state, 0, num_drafts=6)
    lane.use_tree(TREE)

    def only(token_id: int) -> Mask:
        mask = torch.zeros(2, dtype=torch.int32).numpy().view("<u4")
        mask[token_id // 32] = 1 << token_id % 32
        return masks_of(mask[None])[0]

    lane.masks = {0: only(11), 2: only(14), 5: only(15), 6: only(20)}
    draw_lanes(logits, [lane])
    assert lane.token_ids == [11, 14, 15, 20]


@pytest.mark.parametrize(
    "kind", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.8, "top_k": 7}]
)
@pytest.mark.parametrize("num_right", [0, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_chains_are_drawn_as_far_as_their_drafts_are_right(kind: dict[str, Any], num_right: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(num_right)
    logits = torch.randn(12, VOCAB, generator=generator) * 2
    table = torch.tensor([[0x0F0F0F0F, 0x3]], dtype=torch.int32).numpy().view("uint32")
    masks = {2: masks_of(table)[0]} if masked else {}
    state, other = state_of(kind), state_of(kind)
    expected: list[int] = []
    for place in range(5):
        output = sample(logits, [Draw(other, 3 + place, mask=masks.get(place))])
        expected += output.token_ids[0]
        other.tokens.append(expected[-1])
    drafts = [*expected[:num_right], *((token_id + 1) % VOCAB for token_id in expected[num_right:4])]
    state.tokens.set_drafts(drafts)
    alone = state_of(kind)
    lane, single = Lane(state, 3, num_drafts=4), Lane(alone, 9)
    lane.masks = masks
    sample(logits, [Draw(state, 0), Draw(alone, 0)])  # their records are made with the first draw
    draw_lanes(logits, [lane, single])
    assert lane.token_ids == expected[: num_right + 1]
    assert lane.num_refused == 4 - num_right
    assert state.tokens.output() == [5, *expected[: num_right + 1]]
    assert not state.tokens.num_drafts
    assert [single.token_ids] == sample(logits, [Draw(state_of(kind), 9)]).token_ids


def test_a_row_that_fails_among_drafts_fails_alone() -> None:
    logits = torch.zeros(6, VOCAB)
    logits[:, 7] = 1.0
    logits[2] = float("nan")
    kind = {"temperature": 0}
    states = [state_of(kind), state_of(kind)]
    sample(logits, [Draw(state, 0) for state in states])
    for state in states:
        state.tokens.set_drafts([7, 7])
    lanes = [Lane(states[0], 0, num_drafts=2), Lane(states[1], 3, num_drafts=2)]
    draw_lanes(logits, lanes)
    assert lanes[0].failure is not None
    assert (lanes[1].failure, lanes[1].token_ids) == (None, [7, 7, 7])


def test_what_breaks_with_drafts_is_drawn_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is None:
        pytest.skip("no compiled sampler")

    def breaks(*args: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(native, "draw_chains", breaks)
    states = [state_of({"temperature": 0}), state_of({"temperature": 0})]
    logits = torch.eye(6, VOCAB)
    sample(logits, [Draw(state, 0) for state in states])
    for state in states:
        state.tokens.set_drafts([0, 2])
    lanes = [Lane(states[0], 0, num_drafts=2), Lane(states[1], 3, num_drafts=2)]
    draw_lanes(logits, lanes)
    assert [lane.token_ids for lane in lanes] == [[0, 1], [3]]
    monkeypatch.setattr(native, "sample_rows", breaks)
    assert sample_ahead(logits, states, 1) == [None, None]


def test_what_is_drawn_ahead_has_the_bits_of_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)).repeat(9, 1)
    expected, ahead = [], list(range(8))
    state = state_of({"temperature": 1.0})
    for _ in ahead:
        (drawn,) = sample(logits, [Draw(state, 0)]).token_ids[0]
        expected.append(drawn)
        state.tokens.append(drawn)
    state = state_of({"temperature": 1.0})
    assert sample_ahead(logits, [state] * 8, ahead) == expected
    monkeypatch.setattr(native, "library", lambda: None)
    assert sample_ahead(logits, [state] * 8, ahead) == expected
    assert len(set(expected)) > 1
