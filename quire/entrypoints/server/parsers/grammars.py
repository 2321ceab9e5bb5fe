"""The grammar of an answer with tools or thoughts: what a model may write, where it is not free to write anything.

`parsing` asks for it where a call is required, a tool strict, or a thought bounded or followed by a constraint. Pure:
from forms, tools and constraints to a text in llguidance's Lark.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from quire.entrypoints.server.parsers.base import Function, Offer
from quire.entrypoints.server.parsers.forms import Frame, schema_of
from quire.errors import InvalidRequestError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammars.compose import format_of
from quire.text.grammars.lark import ANY_TEXT, Lark
from quire.text.grammars.schema import check_schema
from quire.text.grammars.source import prepared
from quire.text.grammars.tags import FormatWriter

_NO_JSON = r"/([^\s\[{<](?s:.*))?/"  # text that is no beginning of a call in a format without marks


@dataclass(frozen=True)
class Thought:
    """A thought before the answer, between two texts."""

    opening: str  # "" where the prompt has it already
    closing: str
    answer: str = ""  # what begins the answer, where that is no call
    budget: int | None = None  # most tokens of it, where `closing` begins with a token
    never: Collection[int] = ()  # tokens that can't be part of one that has a budget
    optional: bool = False  # the model may answer at once


@dataclass(frozen=True)
class Answer:
    """What an answer is made of.

    Attributes:
        content: what text has to obey; None: any text.
        offer, frame: the tools that may or must be called, and how; None: none.
    """

    content: StructuredOutputsParams | None = None
    offer: Offer | None = None
    frame: Frame | None = None
    thought: Thought | None = None


def answer_grammar(answer: Answer, tokens: Mapping[str, int]) -> str | None:
    """The grammar, or None where the content's constraint can't be part of one. `tokens`: marks that are tokens.

    Raises:
        InvalidRequestError: the content's schema is no JSON, or no grammar can hold it or that of a tool.
    """
    lark = Lark(tokens)
    if (content := _content(lark, answer.content)) is None:
        return None
    lead = lark.text(answer.thought.answer) if answer.thought else ""
    free = answer.content is None
    options = [f"{lead} {content}".strip()]
    if answer.offer is not None and answer.frame is not None:
        calls = _with_calls(lark, answer.offer, answer.frame, free=free and not lead)
        options = calls if answer.offer.choice == "required" else [*options, *calls]
        if free and not lead and not answer.frame.trigger and len(options) > 1:
            options[0] = _NO_JSON
    body = lark.rule(" | ".join(options))
    if answer.thought is None:
        return lark.grammar(body)
    return lark.grammar(f"{_thought(lark, answer.thought, follows=not free or len(options) > 1)} {body}")


def _thought(lark: Lark, thought: Thought, follows: bool) -> str:
    if thought.budget is None:
        text = lark.until(thought.closing)
    else:
        text = lark.few_tokens(thought.budget, thought.closing, thought.never)
    space = "/\\n{0,2}/" if follows and not thought.answer else ""
    whole = " ".join(filter(None, [lark.text(thought.opening), text, space]))
    return f"({whole})?" if thought.optional else whole


def _content(lark: Lark, params: StructuredOutputsParams | None) -> str | None:
    """What text must be."""
    if params is None:
        return ANY_TEXT
    if params.kind in ("grammar", "structural_tag"):
        return None
    format = format_of(params)
    try:
        return FormatWriter(lark, lambda schema: prepared(schema, params)).write(format)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"structured_outputs can't be used: {error}", "structured_outputs") from None


def _with_calls(lark: Lark, offer: Offer, frame: Frame, free: bool) -> list[str]:
    """The ways in which an answer calls tools: by calls alone, and if text may precede them, after text."""
    trigger = frame.trigger
    alone = _calls(lark, offer, frame)
    if offer.choice == "required" or not free or not trigger:
        return [alone]
    if trigger in lark.tokens:
        return [f"{ANY_TEXT} {alone}"]
    return [f"{lark.until(trigger)} {_calls(lark, offer, frame, opened=trigger)}"]


def _calls(lark: Lark, offer: Offer, frame: Frame, opened: str = "") -> str:
    """All calls. `opened`: what of their beginning stands there already."""
    functions = [function for function in offer.functions if offer.named in (None, function.name)]
    lark.opened = opened
    before = lark.text(frame.before)
    lark.opened = "" if frame.before else opened
    first = _one_of(lark, frame, functions)
    lark.opened = ""
    more = ""
    if offer.parallel and offer.named is None and not frame.single:
        again = _one_of(lark, frame, functions) if opened else first
        more = f"({lark.text(frame.between)} {again})*"
    return " ".join(filter(None, [before, first, more, lark.text(frame.after)]))


def _one_of(lark: Lark, frame: Frame, functions: list[Function]) -> str:
    return lark.rule(" | ".join(_call(lark, frame, function) for function in functions))


def _call(lark: Lark, frame: Frame, function: Function) -> str:
    try:
        check_schema(schema_of(function), function.strict)
        return frame.call(lark, function)
    except InvalidRequestError as error:
        message = f"{function.where}: the parameters of {function.name!r} can't be held by a grammar: {error}"
        raise InvalidRequestError(message, "tools") from None
