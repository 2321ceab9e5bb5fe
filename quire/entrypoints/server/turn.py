"""A turn: from a request's outputs to what is new of each choice, with the books that every dialect needs.

A dialect's writer feeds it `RequestOutput`s, whole or in pieces, and writes the `Delta`s in its form; so a whole answer
and a stream of it agree. Pure: no clock, no HTTP, no engine; the same outputs give the same deltas.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from quire.entrypoints.server.parsers.base import ContentEvent, Parser, TextDelta, ToolCallStart, merged
from quire.errors import OverloadedError
from quire.outputs import CompletionOutput, Logprob, RequestOutput


class Finish(Struct, frozen=True):
    """The end of a choice."""

    reason: str  # "stop", "length", or "tool_calls" where a choice that called tools ended by itself
    stop_reason: int | str | None  # the stop token or stop string that ended it


class Delta(Struct):
    """What is new of one choice, or all of it."""

    place: int  # of the prompt, from 0
    index: int  # of the choice within the answer, from 0
    output: RequestOutput  # where it comes from: the prompt and its logprobs
    events: list[ContentEvent]
    token_ids: list[int]
    logprobs: Sequence[dict[int, Logprob] | None]  # of these tokens, where asked for
    begins: bool  # is it the choice's first?
    finish: Finish | None


class Rules(Struct, frozen=True):
    """What a dialect wants told.

    Attributes:
        every_token: a delta for tokens without text, too: their ids, logprobs or number are shown.
        at_once: a choice's first delta comes with its first output, text or not: the prompt is echoed.
        cached_tokens: the usage says how many prompt tokens came from the cache.
        no_tokens: the engine had to draw a token that nobody asked for; it is dropped.
    """

    every_token: bool = False
    at_once: bool = False
    no_tokens: bool = False
    cached_tokens: bool = True


_NO_RULES = Rules()


class _Choice:
    """How far a choice has come."""

    def __init__(self, parser: Parser) -> None:
        self.parser, self.num_tokens = parser, 0
        self.begun = self.finished = self.calls_tools = False


class Turn:
    """The books of a request of one or more prompts, with as many choices for each.

    Attributes:
        num_choices: all of them.
        num_begun: choices that had a delta.
        num_unfinished: choices that are to go on.
    """

    def __init__(
        self, num_prompts: int, num_choices: int, rules: Rules = _NO_RULES, make_parser: Callable[[], Parser] = Parser
    ) -> None:
        self._choices = [_Choice(make_parser()) for _ in range(num_prompts * num_choices)]
        self._choices_each, self._rules = num_choices, rules
        self._outputs: dict[int, RequestOutput] = {}  # place of the prompt -> its latest output
        self.num_choices = self.num_unfinished = len(self._choices)
        self.num_begun = 0
        self._tells_text = self.num_choices == 1 and make_parser is Parser and not rules.every_token

    def take(self, place: int, output: RequestOutput) -> list[Delta]:
        """What an output of the prompt at this place brings.

        Raises:
            OverloadedError: a sequence was ended from outside. (One that failed is for `AsyncLLM` to tell.)
        """
        self._outputs[place] = output
        deltas: list[Delta] = []
        for part in output.outputs:
            index = place * self._choices_each + part.index
            choice = self._choices[index]
            if choice.finished:  # a request's last output has all its sequences once more
                continue
            if part.finish_reason == "abort":
                message = "the request was ended before it was complete, as the server stops or sleeps; send it again."
                raise OverloadedError(message)
            if self._rules.no_tokens:
                part = CompletionOutput(part.index, "", [], logprobs=[], finish_reason="length")
            events, finish = choice.parser.push(part.text), None
            if part.finish_reason is not None:
                events += choice.parser.finish(cut=part.finish_reason == "length")
                choice.finished = True
                self.num_unfinished -= 1
            if len(events) > 1 or (events and not isinstance(events[0], TextDelta)):
                events = merged(events)
                choice.calls_tools |= any(isinstance(event, ToolCallStart) for event in events)
            if part.finish_reason is not None:
                calls = choice.calls_tools and part.finish_reason == "stop"
                finish = Finish("tool_calls" if calls else part.finish_reason, part.stop_reason)
            choice.num_tokens += len(part.token_ids)
            begins, rules = not choice.begun, self._rules
            if events or finish is not None or rules.every_token or (begins and rules.at_once):
                choice.begun = True
                self.num_begun += begins
                entries = part.logprobs or ()
                deltas.append(Delta(place, index, output, events, part.token_ids, entries, begins, finish))
        return deltas

    def join(self, others: "Sequence[Turn]") -> None:
        """Take in other turns' prompts, after its own, before any has an output."""
        self._choices += [choice for other in others for choice in other._choices]
        self.num_choices = self.num_unfinished = len(self._choices)
        self._tells_text &= not others

    @property
    def tells_text(self) -> bool:
        """Whether no more is told of the only choice but its text, until it ends."""
        return self._tells_text and self._choices[0].begun

    @property
    def outputs(self) -> list[RequestOutput]:
        """The latest one of each prompt."""
        return list(self._outputs.values())

    def counts(self) -> tuple[int, int, int | None]:
        """Tokens so far: of prompts, of outputs, and of prompts from the prefix cache, None where that is not told."""
        outputs = self._outputs.values()
        return (
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(choice.num_tokens for choice in self._choices),
            sum(output.num_cached_tokens or 0 for output in outputs) if self._rules.cached_tokens else None,
        )


def text_of(events: list[ContentEvent]) -> str:
    """The text of a delta from `Parser`."""
    if not events:
        return ""
    (event,) = events
    assert isinstance(event, TextDelta), "another parser needs a dialect that writes its events"
    return event.text
