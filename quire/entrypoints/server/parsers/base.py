"""What a parser is, the events it makes of a model's text, and the one for text that means nothing but itself.

A `Turn` has one parser for each choice. A parser sees the text as it comes, in pieces of any length, and may hold back
an end that could be part of a mark; how the text was cut never changes what it makes of the whole. It knows neither
engine nor HTTP.
"""

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct


class TextDelta(Struct, frozen=True):
    """More of the answer."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallStart(Struct, frozen=True):
    """A call of a tool begins. The one before it has ended."""

    number: int  # of the call within the choice, from 0
    id: str
    name: str


class ToolCallDelta(Struct, frozen=True):
    """More of a call's arguments."""

    number: int
    arguments: str  # a piece of JSON


class ToolCallEnd(Struct, frozen=True):
    """A call's arguments are complete, or the text ended within them."""

    number: int


ContentEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class Function(Struct, frozen=True):
    """A tool that the model may call."""

    name: str
    parameters: dict[str, Any] = {}  # JSON schema of an object
    strict: bool = False  # arguments have to obey the schema, so a grammar holds them
    where: str = "tools"  # in the request, for errors


class Offer(Struct, frozen=True):
    """The tools of a request, and what the model is to do with them.

    Attributes:
        functions: those that may be called.
        choice: "auto" leaves it to the model, "required" asks for at least one call, "none" forbids calls.
        named: the one function that has to be called, if the request names it.
        parallel: several calls in one answer are allowed.
        closed: only `functions` may be called, though the template shows others too.
    """

    functions: tuple[Function, ...] = ()
    choice: Literal["auto", "required", "none"] = "auto"
    named: str | None = None
    parallel: bool = True
    closed: bool = False


class Parser:
    """Reads one choice's text; to this one all of it is the answer."""

    def push(self, text: str) -> list[ContentEvent]:
        """What a further piece of text brings."""
        return [TextDelta(text)] if text else []

    def finish(self, cut: bool = False) -> list[ContentEvent]:
        """What is left once the text has ended. `cut`: the tokens did not suffice, so a call's beginning is no text."""
        return []


def merged(events: Iterable[ContentEvent]) -> list[ContentEvent]:
    """The same with neighbours of one kind as one event."""
    result: list[ContentEvent] = []
    for event in events:
        last = result[-1] if result else None
        match last, event:
            case (TextDelta(), TextDelta()) | (ReasoningDelta(), ReasoningDelta()):
                result[-1] = type(event)(last.text + event.text)
            case ToolCallDelta(), ToolCallDelta():
                result[-1] = ToolCallDelta(event.number, last.arguments + event.arguments)
            case _:
                result.append(event)
    return result
