"""What a stranger's text looks like in a log."""

import pytest

from quire.utils.logs import quoted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "'plain'"),
        ("two\nlines", r"'two\nlines'"),
        ("\x1b[2K\x9b1A", r"'\x1b[2K\x9b1A'"),
        ("\u2028\u202e", r"'\u2028\u202e'"),
        ("x" * 300, "'" + "x" * 200 + "'..."),
    ],
)
def test_quoted(text: str, shown: str) -> None:
    assert quoted(text) == shown
