"""Hidden states that wait for an EAGLE head: which are kept, given up, and made up where none were seen."""

import torch
from torch import Tensor

from quire.models.held_states import HeldStates


def states(start: int, stop: int) -> Tensor:
    """[stop - start, 2]: of each position its number."""
    return torch.arange(start, stop).float().repeat_interleave(2).view(-1, 2)


def taken(held: HeldStates, stop: int) -> list[int]:
    return [int(value) for part in held.take(stop) for value in part[:, 0]]


def test_each_token_is_read_with_the_state_before_it() -> None:
    held = HeldStates()
    held.add(0, states(0, 4))
    held.add(4, states(4, 6))
    assert taken(held, 3) == [0, 1]
    assert held.num_read == 3
    assert taken(held, 7) == [2, 3, 4, 5]


def test_refused_drafts_are_forgotten() -> None:
    held = HeldStates()
    held.add(0, states(0, 6))
    held.cut(4)
    held.add(4, states(4, 5))
    assert taken(held, 6) == [0, 1, 2, 3, 4]


def test_a_prefix_that_another_one_has_read_is_not_read_again() -> None:
    held = HeldStates()
    held.add(8, states(8, 10))
    assert (held.first, held.num_read) == (8, 8)
    assert taken(held, 11) == [8, 8, 9]


def test_steps_without_drafts_leave_a_gap_that_its_neighbour_fills() -> None:
    held = HeldStates()
    held.add(0, states(0, 3))
    assert taken(held, 3) == [0, 1]
    held.add(6, states(6, 8))
    assert held.num_read == 3, "what was missed is still to be read"
    assert taken(held, 9) == [2, 6, 6, 6, 6, 7]
