"""What only the reference backend has: float16, and work that is cut into groups once for all layers."""

import pytest
import torch
from paged import alone, attend, attend_once, dense, make_sequences, make_spec, mixed, whole

from quire.attention.base import AttentionBatch
from quire.attention.reference import ReferenceBackend

BACKEND = ReferenceBackend()


@pytest.mark.parametrize("head_dim", [8, 40, 128])
def test_float16(head_dim: int) -> None:
    sequences = make_sequences([70, 5], (4, 2), head_dim, torch.float16)
    found = attend(BACKEND, sequences, whole(sequences), 16)
    for sequence, out in zip(sequences, found, strict=True):
        assert out.dtype == torch.float16
        torch.testing.assert_close(out.double(), dense(sequence, head_dim**-0.5, None), atol=2e-3, rtol=2e-3)
    for one, two in zip(found, attend(BACKEND, sequences, alone(sequences, 3), 8), strict=True):
        assert torch.equal(one, two)


def test_large_groups_are_cut_and_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = make_sequences([180, 150, 40, 9], (4, 2), 8)
    expected = attend(BACKEND, sequences, mixed(sequences, 4), 16)
    monkeypatch.setattr("quire.attention.reference.MAX_TILE_FLOATS", 1 << 12)
    for steps in (mixed(sequences, 4), whole(sequences)):
        for one, two in zip(expected, attend(BACKEND, sequences, steps, 16), strict=True):
            assert torch.equal(one, two)


def test_work_is_cut_once_for_all_layers_of_a_kind() -> None:
    sequences = make_sequences([20], (4, 2), 8)
    batch = AttentionBatch(torch.tensor([0, 20]), torch.tensor([20]), torch.tensor([[0]]), torch.arange(20), 32)
    metadata = BACKEND.build(batch)
    cache = torch.zeros(BACKEND.kv_cache_shape(1, 32, 2, 8))
    for window in (None, None, 4, 4):
        attend_once(BACKEND, sequences[0], make_spec(sequences[0], window), cache, metadata)
    assert len(metadata._work) == 2


@pytest.mark.parametrize("window", [None, 1, 30, 64])
def test_without_order_a_token_sees_those_after_it(window: int | None) -> None:
    sequences = make_sequences([1, 64, 200, 40], (4, 2), 16)
    found = attend(BACKEND, sequences, whole(sequences), 16, window, causal=False)
    for sequence, out in zip(sequences, found, strict=True):
        expected = dense(sequence, 16**-0.5, window, causal=False)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
        [one] = attend(BACKEND, [sequence], [[len(sequence)]], 8, window, causal=False)
        assert torch.equal(one, out)


@pytest.mark.parametrize("head_dim", [5, 6, 10, 11, 12])
def test_odd_heads_do_not_depend_on_a_token_s_place_in_its_tile(head_dim: int) -> None:
    sequences = make_sequences([40, 23], (4, 4), head_dim)
    expected = attend(BACKEND, sequences, whole(sequences), 16)
    for cut in (1, 3, 7):
        for one, two in zip(expected, attend(BACKEND, sequences, alone(sequences, cut), 16), strict=True):
            assert torch.equal(one, two)
