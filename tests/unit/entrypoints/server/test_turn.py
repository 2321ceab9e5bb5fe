"""One table of transcripts: a request's outputs, what a turn makes of them, and how each dialect writes that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.dialects.chat import ChatWriter
from quire.entrypoints.server.dialects.completions import CompletionWriter
from quire.entrypoints.server.parsers.base import (
    ContentEvent,
    Offer,
    Parser,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from quire.entrypoints.server.parsers.reader import ScriptParser
from quire.entrypoints.server.parsers.registry import TOOL_FORMS
from quire.entrypoints.server.turn import Delta, Finish, Rules, Turn, text_of
from quire.errors import OverloadedError
from quire.outputs import CompletionOutput, RequestOutput


def output(*parts: CompletionOutput, finished: bool = False, prompt: tuple[int, ...] = (7, 8)) -> RequestOutput:
    return RequestOutput("r", None, list(prompt), outputs=list(parts), finished=finished, num_cached_tokens=1)


def part(index: int, text: str, ids: list[int], ends: str | None = None, stop: str | None = None) -> CompletionOutput:
    return CompletionOutput(index, text, ids, finish_reason=ends, stop_reason=stop)


@dataclass(frozen=True)
class Transcript:
    """A stream of one request.

    Attributes:
        outputs: (place of the prompt, output).
        deltas: (index, text, token ids, does it begin, reason of the end), by output.
        completions, chat: each chunk's choice, or its usage where it has none.
    """

    outputs: list[tuple[int, RequestOutput]]
    deltas: list[list[tuple[int, str, list[int], bool, str | None]]]
    completions: list[Any]
    chat: list[Any]
    num_prompts: int = 1
    num_choices: int = 1
    rules: Rules = Rules()
    body: dict[str, Any] = field(default_factory=dict)


def text(index: int, content: str, ends: str | None = None, stop: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": content, "logprobs": None, "finish_reason": ends, "stop_reason": stop, **more}


def said(index: int, content: str, role: bool, ends: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {"content": content} | ({"role": "assistant"} if role else {})
    end = {"stop_reason": None} if ends else {}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": ends} | end | more


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


TRANSCRIPTS = {
    "text in pieces": Transcript(
        outputs=[
            (0, output(part(0, "Once", [1]))),
            (0, output(part(0, " more", [2, 3]))),
            (0, output(part(0, ".", [4], "stop"), finished=True)),
        ],
        deltas=[[(0, "Once", [1], True, None)], [(0, " more", [2, 3], False, None)], [(0, ".", [4], False, "stop")]],
        completions=[text(0, "Once"), text(0, " more"), text(0, ".", "stop")],
        chat=[said(0, "Once", True), said(0, " more", False), said(0, ".", False, "stop")],
    ),
    "a piece without text tells nothing": Transcript(
        outputs=[
            (0, output(part(0, "", [1]))),
            (0, output(part(0, "é", [2]))),
            (0, output(part(0, "", [3], "length"), finished=True)),
        ],
        deltas=[[], [(0, "é", [2], True, None)], [(0, "", [3], False, "length")]],
        completions=[text(0, "é"), text(0, "", "length")],
        chat=[said(0, "é", True), said(0, "", False, "length")],
    ),
    "unless its tokens are shown": Transcript(
        outputs=[(0, output(part(0, "", [1]))), (0, output(part(0, "é", [2], "length"), finished=True))],
        deltas=[[(0, "", [1], True, None)], [(0, "é", [2], False, "length")]],
        completions=[text(0, "", token_ids=[1], prompt_token_ids=[7, 8]), text(0, "é", "length", token_ids=[2])],
        chat=[said(0, "", True, token_ids=[1]), said(0, "é", False, "length", token_ids=[2])],
        rules=Rules(every_token=True),
        body={"return_token_ids": True},
    ),
    "nothing at all": Transcript(
        outputs=[(0, output(part(0, "", [0], "stop"), finished=True))],
        deltas=[[(0, "", [0], True, "stop")]],
        completions=[text(0, "", "stop")],
        chat=[said(0, "", True, "stop")],
    ),
    "choices that end apart, and come once more at the end": Transcript(
        outputs=[
            (0, output(part(0, "a", [1]), part(1, "b", [2], "stop"))),
            (0, output(part(0, "c", [3], "length"), part(1, "", [], "stop"), finished=True)),
        ],
        deltas=[[(0, "a", [1], True, None), (1, "b", [2], True, "stop")], [(0, "c", [3], False, "length")]],
        completions=[text(0, "a"), text(1, "b", "stop"), text(0, "c", "length")],
        chat=[said(0, "a", True), said(1, "b", True, "stop"), said(0, "c", False, "length")],
        num_choices=2,
    ),
    "the usage of all of it": Transcript(
        outputs=[(0, output(part(0, "a", [1, 2]))), (0, output(part(0, "b", [3], "stop"), finished=True))],
        deltas=[[(0, "a", [1, 2], True, None)], [(0, "b", [3], False, "stop")]],
        completions=[text(0, "a"), text(0, "b", "stop"), usage(2, 3, 1)],
        chat=[said(0, "a", True), said(0, "b", False, "stop"), usage(2, 3, 1)],
        body={"stream_options": {"include_usage": True}},
    ),
    "an echo": Transcript(
        outputs=[(0, output(part(0, "", [1]))), (0, output(part(0, "b", [2], "stop"), finished=True))],
        deltas=[[(0, "", [1], True, None)], [(0, "b", [2], False, "stop")]],
        completions=[text(0, "Echo: "), text(0, "b", "stop")],
        chat=[said(0, "Echo: ", True), said(0, "b", False, "stop")],
        rules=Rules(at_once=True),
        body={"echo": True},
    ),
}
SEVERAL_PROMPTS = Transcript(
    outputs=[
        (1, output(part(0, "x", [1], "stop"), finished=True, prompt=(5,))),
        (0, output(part(0, "y", [2]))),
        (0, output(part(0, "z", [3], "stop", "z"), finished=True)),
    ],
    deltas=[[(1, "x", [1], True, "stop")], [(0, "y", [2], True, None)], [(0, "z", [3], False, "stop")]],
    completions=[text(1, "x", "stop"), text(0, "y"), text(0, "z", "stop", "z"), usage(3, 3, 2)],
    chat=[],
    num_prompts=2,
    body={"stream_options": {"include_usage": True}},
)
SCORED = Transcript(
    outputs=[(0, output(part(0, "drawn", [9], "length"), finished=True))],
    deltas=[[(0, "", [], True, "length")]],
    completions=[text(0, "Echo: ", "length")],
    chat=[],
    rules=Rules(at_once=True, no_tokens=True),
    body={"echo": True, "max_tokens": 0},
)
COMPLETIONS = TRANSCRIPTS | {"several prompts": SEVERAL_PROMPTS, "a prompt that is only scored": SCORED}


def turn_of(transcript: Transcript) -> Turn:
    return Turn(transcript.num_prompts, transcript.num_choices, transcript.rules)


def flat(delta: Delta) -> tuple[int, str, list[int], bool, str | None]:
    return delta.index, text_of(delta.events), delta.token_ids, delta.begins, delta.finish and delta.finish.reason


@pytest.mark.parametrize("name", COMPLETIONS)
def test_deltas(name: str) -> None:
    transcript = COMPLETIONS[name]
    turn = turn_of(transcript)
    assert [[flat(delta) for delta in turn.take(*each)] for each in transcript.outputs] == transcript.deltas
    assert (turn.num_unfinished, turn.num_begun) == (0, turn.num_choices)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_text_that_is_all_there_is(name: str) -> None:
    """Where one choice goes on whose text is told and no more, a delta has nothing else to tell."""
    transcript = COMPLETIONS[name]
    turn = turn_of(transcript)
    for (place, one), deltas in zip(transcript.outputs, transcript.deltas, strict=True):
        tells_text, begun = turn.tells_text, turn.num_begun
        turn.take(place, one)
        if tells_text and turn.num_unfinished:
            assert (turn.num_choices, begun, transcript.rules.every_token) == (1, 1, False)
            assert {(index, begins, reason) for index, _, _, begins, reason in deltas} <= {(0, False, None)}


def test_only_plain_text_is_all_there_is() -> None:
    """Where a parser reads the text, or choices stand side by side, there may be more to it."""
    plain, others = (
        Turn(1, 1),
        [Turn(1, 2), Turn(2, 1), Turn(1, 1, Rules(every_token=True)), Turn(1, 1, Rules(), Doubling)],
    )
    assert not plain.tells_text, "an answer's first event has more to tell"
    for turn in (plain, *others):
        turn.take(0, output(part(0, "a", [1])))
        assert turn.tells_text == (turn is plain)


class Doubling(Parser):
    """Not what all text is the answer to."""

    def push(self, text: str) -> list[ContentEvent]:
        return super().push(2 * text)


def completion_writer(transcript: Transcript) -> Any:
    body = CompletionRequest.model_validate({"prompt": "Echo: ", "stream": True} | transcript.body)
    return CompletionWriter(body, ("id", 1, "m"), turn_of(transcript), None, False, ["Echo: "] * transcript.num_prompts)


def chat_writer(transcript: Transcript) -> Any:
    messages = [{"role": "assistant", "content": "Echo: "}]
    body = ChatCompletionRequest.model_validate({"messages": messages, "stream": True} | transcript.body)
    return ChatWriter(body, ("id", 1, "m"), turn_of(transcript), "assistant", False)


def chunks(transcript: Transcript, writer: Any) -> list[Any]:
    """The choice of each chunk, or the usage of one that has none."""
    written = [writer.chunk(delta) for each in transcript.outputs for delta in writer.turn.take(*each)]
    if writer.ends_with_usage:
        written.append(writer.usage_chunk())
    found: list[Any] = []
    for chunk in written:
        plain = msgspec.json.decode(msgspec.json.encode(chunk))
        assert (plain["id"], plain["created"], plain["model"]) == ("id", 1, "m")
        found += plain["choices"] or [plain["usage"]]
    return found


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_stream(name: str) -> None:
    transcript = COMPLETIONS[name]
    assert chunks(transcript, completion_writer(transcript)) == transcript.completions


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_chat_stream(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    assert chunks(transcript, chat_writer(transcript)) == transcript.chat


def last_outputs(transcript: Transcript) -> list[tuple[int, RequestOutput]]:
    """One output for each prompt, with all that came."""
    ends: dict[int, RequestOutput] = {}
    for place, each in transcript.outputs:
        whole = ends.setdefault(place, output(finished=True, prompt=tuple(each.prompt_token_ids)))
        known = {p.index: p for p in whole.outputs}
        for new in each.outputs:
            old = known.setdefault(new.index, part(new.index, "", []))
            old.text, old.token_ids = old.text + new.text, old.token_ids + new.token_ids
            old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
        whole.outputs = [known[index] for index in sorted(known)]
    return sorted(ends.items())


WHOLE = [(completion_writer, name) for name in COMPLETIONS] + [(chat_writer, name) for name in TRANSCRIPTS]


@pytest.mark.parametrize(("make", "name"), WHOLE)
def test_a_whole_answer_is_the_sum_of_its_stream(make: Callable[[Transcript], Any], name: str) -> None:
    transcript, streamed = COMPLETIONS[name], dict[int, str]()
    for choice in chunks(transcript, make(transcript)):
        if "index" in choice:
            piece = choice["text"] if "text" in choice else choice["delta"]["content"]
            streamed[choice["index"]] = streamed.get(choice["index"], "") + piece
    writer, outputs = make(transcript), last_outputs(transcript)
    choices = [writer.choice(delta) for each in outputs for delta in writer.turn.take(*each)]
    answer = msgspec.json.decode(msgspec.json.encode(writer.answer(choices, outputs[0][1])))
    texts = {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]}
    assert texts == streamed
    assert all(choice["finish_reason"] for choice in answer["choices"])
    num_tokens = (
        0 if name == "a prompt that is only scored" else sum(len(p.token_ids) for _, o in outputs for p in o.outputs)
    )
    assert answer["usage"]["completion_tokens"] == num_tokens


def test_a_sequence_that_was_ended_is_no_answer() -> None:
    with pytest.raises(OverloadedError):
        Turn(1, 1).take(0, output(part(0, "", [], "abort"), finished=True))


class _Thinks(Parser):
    """A parser for tests: all before the first full stop is thought, whose last character may be held back."""

    def __init__(self) -> None:
        self._held, self._thinks = "", True

    def push(self, text: str) -> list[ContentEvent]:
        if not self._thinks:
            return [TextDelta(text)]
        thought, mark, rest = (self._held + text).partition(".")
        self._held, self._thinks = ("" if mark else thought[-1:]), not mark
        shown = thought if mark else thought[:-1]
        events: list[ContentEvent] = [ReasoningDelta(shown)] if shown else []
        return [*events, TextDelta(rest)] if rest else events

    def finish(self, cut: bool = False) -> list[ContentEvent]:
        return [ReasoningDelta(self._held)] if self._held else []


def test_a_turn_gives_the_events_of_its_parser() -> None:
    """Each choice has a parser of its own, which is told of the end."""
    turn = Turn(1, 2, make_parser=_Thinks)
    first = turn.take(0, output(part(0, "So", [1]), part(1, "H", [2])))
    assert [delta.events for delta in first] == [[ReasoningDelta("S")]]
    second = turn.take(0, output(part(0, "o. Yes", [3], "stop"), part(1, "m", [4], "length"), finished=True))
    assert [delta.events for delta in second] == [
        [ReasoningDelta("oo"), TextDelta(" Yes")],
        [ReasoningDelta("Hm")],
    ]
    assert [delta.finish for delta in second] == [Finish("stop", None), Finish("length", None)]
    assert turn.counts() == (2, 4, 1)


class _Calls(Parser):
    """A parser for tests: each word is a call of the tool of that name, a full stop text."""

    def __init__(self) -> None:
        self._number = -1

    def push(self, text: str) -> list[ContentEvent]:
        events: list[ContentEvent] = []
        for word in text.split():
            if word == ".":
                events.append(TextDelta(word))
                continue
            self._number += 1
            id = f"call_{self._number}"
            events += [ToolCallStart(self._number, id, word), ToolCallDelta(self._number, "{")]
            events += [ToolCallDelta(self._number, "}"), ToolCallEnd(self._number)]
        return events

    def finish(self, cut: bool = False) -> list[ContentEvent]:
        return []


def called(number: int, name: str) -> dict[str, Any]:
    return {"id": f"call_{number}", "function": {"name": name, "arguments": "{}"}, "type": "function"}


@pytest.mark.parametrize(("ends", "told"), [("stop", "tool_calls"), ("length", "length")])
def test_calls_of_tools(ends: str, told: str) -> None:
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "stream": True})
    pieces = [(0, output(part(0, "a", [1]))), (0, output(part(0, "b c", [2]))), (0, output(part(0, "", [3], ends)))]

    def writer() -> ChatWriter:
        return ChatWriter(body, ("id", 1, "m"), Turn(1, 1, make_parser=_Calls), "assistant", False)

    def plain(struct: msgspec.Struct) -> Any:
        return msgspec.json.decode(msgspec.json.encode(struct))

    stream = writer()
    chosen = [plain(stream.chunk(d))["choices"][0] for each in pieces for d in stream.turn.take(*each)]
    assert [choice["delta"].get("tool_calls", []) for choice in chosen] == [
        [{"index": 0, **called(0, "a")}],
        [{"index": 1, **called(1, "b")}, {"index": 2, **called(2, "c")}],
        [],
    ]
    assert chosen[0]["delta"]["content"] is None
    assert [choice["finish_reason"] for choice in chosen] == [None, None, told]
    whole = writer()
    (delta,) = whole.turn.take(0, output(part(0, "a b c", [1, 2, 3], ends), finished=True))
    choice = plain(whole.choice(delta))
    assert choice["message"]["tool_calls"] == [called(0, "a"), called(1, "b"), called(2, "c")]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, told)
    (mixed,) = writer().turn.take(0, output(part(0, ". a .", [1], "stop"), finished=True))
    assert plain(whole.choice(mixed))["message"]["content"] == ".."


def test_text_is_text() -> None:
    parser = Parser()
    assert (parser.push("<think>"), parser.push(""), parser.finish()) == ([TextDelta("<think>")], [], [])


@pytest.mark.parametrize(("reason", "texts"), [("length", []), ("stop", ["\n<tool_call"])])
def test_the_beginning_of_a_call_is_text_only_where_the_model_ended_it(reason: str, texts: list[str]) -> None:
    turn = Turn(1, 1, make_parser=lambda: ScriptParser(TOOL_FORMS["hermes"].script, Offer(), str))
    part = CompletionOutput(0, "\n<tool_call", [1], finish_reason=reason)
    (delta,) = turn.take(0, RequestOutput("r", None, [5], outputs=[part], finished=True))
    assert [event.text for event in delta.events if isinstance(event, TextDelta)] == texts
