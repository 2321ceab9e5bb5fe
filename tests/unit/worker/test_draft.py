"""What a draft model has read of a sequence, when its drafts are judged, and when others are forced instead."""

import pytest

from quire.worker.draft import Reader
from tests.tokens import tokens_of


@pytest.mark.parametrize(
    ("became", "right"),
    [
        ([7, 8, 9, 1], 3),  # all that it drafted and read, and a token more
        ([7, 8, 5], 2),
        ([6], 0),
        ([6, 7, 8, 9], 0),  # forced by a grammar instead
        ([7, 5, 9, 1, 2], 1),
        ([7], 0),  # the newest token is nobody's yet
    ],
)
def test_only_what_became_a_token_counts_as_read(became: list[int], right: int) -> None:
    tokens = tokens_of([1, 2, 3], [4], 20)
    reader = Reader(num_read=4 + 3, drafted=[7, 8, 9])
    for token_id in became:
        tokens.append(token_id)
    assert reader.keep_right(tokens) == 4 + right
    assert reader.keep_right(tokens) == 4 + right
