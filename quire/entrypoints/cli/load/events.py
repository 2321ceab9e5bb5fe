"""What OpenAI-compatible servers say, as far as clients here want it: events of streamed answers, and errors.

Servers differ in habits, so that only what is used is read, and much of that may be missing.
"""

from collections.abc import Iterator
from typing import Any

import msgspec


class Delta(msgspec.Struct):
    """What a chunk adds to a chat answer."""

    role: str | None = None
    content: str | None = None


class Choice(msgspec.Struct):
    """One answer's part of a chunk: `text` in completions, `delta` in chat."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        """The text that this chunk adds."""
        return (self.delta.content if self.delta else self.text) or ""

    @property
    def is_token(self) -> bool:
        """Whether it stands for a token: not the mere role that some servers open with, nor a mere end."""
        role_only = self.delta is not None and self.delta.role is not None
        return bool(self.piece) or (self.finish_reason is None and not role_only)


class Usage(msgspec.Struct):
    """Tokens of a request, as the server counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(msgspec.Struct):
    """A server-sent event of a streamed answer."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Event).decode


class EventReader:
    """Takes a streamed answer in pieces, and gives its events.

    Attributes:
        ended: the last word has been said: a finish reason, or [DONE].
        failure: kind and message of an error that the stream told of, or of an event that is none.
    """

    def __init__(self) -> None:
        self.ended = False
        self.failure: tuple[str, str] | None = None
        self._rest = b""  # of a line

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that are complete with this piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.ended = True
                continue
            try:
                event = _decode(data)
            except msgspec.DecodeError as error:
                self.failure = self.failure or ("malformed chunk", f"the server sent what is no chunk: {error}.")
                continue
            if event.error is not None:
                message, code = error_words(data)
                self.failure = self.failure or (f"error in the stream {code or ''}".strip(), message)
            self.ended = self.ended or any(choice.finish_reason for choice in event.choices or ())
            yield event


def error_words(body: bytes) -> tuple[str, str | None]:
    """The message and the code (or type) in the body of an error, whichever form the server gives it."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace").strip() or "no reason given", None
    error = value.get("error", value) if isinstance(value, dict) else value
    if not isinstance(error, dict):
        return str(error), None
    code = error.get("code") if isinstance(error.get("code"), str) else error.get("type")
    return str(error.get("message") or error.get("detail") or error), code
