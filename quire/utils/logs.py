"""How a process of Quire's writes its log: one line an event, with the time, on standard error.

The server and the engine's process call `configure_logging` once at start-up; a library user's own logging is left
alone. What comes from a stranger is logged `quoted`.
"""

import logging

logger = logging.getLogger("quire")  # all of the package writes to it


def configure_logging(level: str, origin: str = "") -> None:
    """Send Quire's log (logger "quire" and below) to standard error, from this level up; `origin` begins each line."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(f"%(asctime)s %(levelname)-7s {origin}%(message)s", "%H:%M:%S"))
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class _Formatter(logging.Formatter):
    """Shows what is not printable as escapes: an exception's text may hold anything, and a log is read in terminals."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def quoted(text: str, longest: int = 200) -> str:
    """A stranger's text for a log: in quotes, in ASCII, and cut, so that it can't write lines or control a terminal."""
    return ascii(text) if len(text) <= longest else ascii(text[:longest]) + "..."
