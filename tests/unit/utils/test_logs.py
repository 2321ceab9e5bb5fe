"""What a stranger's text looks like in a log."""

import io
import logging

import pytest

from quire.utils.logs import configure_logging, quoted


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


def test_nothing_that_is_logged_controls_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the text of an exception that nobody foresaw."""
    logger = logging.getLogger("quire")
    before = logger.handlers, logger.level, logger.propagate
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("info")
    try:
        try:
            raise ValueError("\x1b[31m\x9b\u202e caf\u00e9")
        except ValueError:
            logger.exception("it failed")
    finally:
        logger.handlers, logger.level, logger.propagate = before
    assert r"ValueError: \x1b[31m\x9b\u202e caf" + "\u00e9\n" in stream.getvalue()
