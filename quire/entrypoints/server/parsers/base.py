"""What a parser is, the events it makes of a model's text, and the one for text that means nothing but itself.

A `Turn` has one parser for each choice. A parser sees the text as it comes, in pieces of any length, and may hold back
an end that could be part of a mark. It knows neither engine nor HTTP.
"""

from typing import Protocol

from msgspec import Struct


class TextDelta(Struct, frozen=True):
    """More of the answer."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallStart(Struct, frozen=True):
    """A call of a tool begins."""

    number: int  # of the call within the choice, from 0
    id: str
    name: str


class ToolCallDelta(Struct, frozen=True):
    """More of a call's arguments."""

    number: int
    arguments: str  # a piece of JSON


class ToolCallEnd(Struct, frozen=True):
    """A call's arguments are complete."""

    number: int


ContentEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class Parser(Protocol):
    """Reads one choice's text."""

    def push(self, text: str) -> list[ContentEvent]:
        """What a further piece of text brings."""
        ...

    def finish(self) -> list[ContentEvent]:
        """What is left once the text has ended."""
        ...


class TextParser:
    """All text is the answer."""

    def push(self, text: str) -> list[ContentEvent]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[ContentEvent]:
        return []
