"""Every format says the same things: quoted and nested arguments, all of Unicode, two calls, text and thoughts before.

`WRITERS` writes calls as a model of each format does, the learned ones and plain JSON among them. What is read must be
what was meant, whole and cut at every byte. What is wrong is in the table of test_transcripts.py.
"""

import codecs
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_transcripts import FERRY, OFFER, Said, read, told, tool_parser
from test_transcripts import parser_of as parser_with

from quire.entrypoints.server.parsers.base import ContentEvent, Parser
from quire.entrypoints.server.parsers.forms import Form
from quire.entrypoints.server.parsers.generic import JSON_CALLS, json_arguments, learned_form
from quire.entrypoints.server.parsers.reader import ScriptParser
from quire.entrypoints.server.parsers.registry import _TOOL_SIGNS, TOOL_FORMS
from quire.entrypoints.server.parsers.thoughts import FORMS as THOUGHTS

Call = tuple[str, dict[str, Any]]


def as_json(calls: list[Call], key: str = "arguments", ascii_only: bool = False) -> list[str]:
    return [json.dumps({"name": name, key: given}, ensure_ascii=ascii_only) for name, given in calls]


def raw(value: Any) -> str:
    """Strings as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def qwen3_coder(calls: list[Call]) -> str:
    said = ""
    for name, given in calls:
        said += f"<tool_call>\n<function={name}>\n"
        said += "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in given.items())
        said += "</function>\n</tool_call>\n"
    return said


def glm(calls: list[Call]) -> str:
    said = ""
    for name, given in calls:
        pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{raw(v)}</arg_value>\n" for k, v in given.items()]
        said += f"<tool_call>{name}\n{''.join(pairs)}</tool_call>\n"
    return said


def deepseek(calls: list[Call]) -> str:
    said = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{raw(given)}<｜tool▁call▁end｜>" for name, given in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(said)}<｜tool▁calls▁end｜>"


def kimi(calls: list[Call]) -> str:
    said = ""
    for number, (name, given) in enumerate(calls):
        said += f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{raw(given)}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{said}<|tool_calls_section_end|>"


def harmony(calls: list[Call]) -> str:
    mark = "<|start|>assistant<|channel|>commentary to=functions."
    return "".join(f"{mark}{name} <|constrain|>json<|message|>{raw(given)}<|call|>" for name, given in calls)


def pythonic(calls: list[Call]) -> str:
    said = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return f"[{', '.join(said)}]"


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in as_json(calls)),
    "llama3_json": lambda calls: "<|python_tag|>" + "; ".join(as_json(calls, "parameters", True)),
    "llama4_pythonic": pythonic,
    "mistral": lambda calls: f"[TOOL_CALLS] [{', '.join(as_json(calls, ascii_only=True))}]",
    "qwen3_coder": qwen3_coder,
    "deepseek_v3": deepseek,
    "granite": lambda calls: f"<|tool_call|>[{', '.join(as_json(calls))}]",
    "phi4_mini_json": lambda calls: f"functools[{', '.join(as_json(calls, ascii_only=True))}]",
    "gemma": lambda calls: "".join(f"<|tool_call>call:{name}{gemma(given)}<tool_call|>" for name, given in calls),
    "glm45": glm,
    "kimi_k2": kimi,
    "openai": harmony,
    "JSON": lambda calls: f"[{', '.join(as_json(calls, 'parameters'))}]",
    "learned": lambda calls: "".join(f"<call>{one}</call>" for one in as_json(calls)),
    "learned with a name": lambda calls: "".join(f"<fn={name}>{raw(given)}</fn>" for name, given in calls),
}


def learned(with_name: bool) -> Form:
    def render(messages: list[dict[str, Any]], tools: list[Any], opened: bool) -> str:
        text = ""
        for message in messages:
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
            said = WRITERS["learned with a name" if with_name else "learned"](calls)
            text += f"<|{message['role']}|>{message['content']}{said}<|end|>\n"
        return text + ("<|assistant|>" if opened else "")

    form = learned_form(render)
    assert form is not None
    return form


LEARNED = {"JSON": JSON_CALLS, "learned": learned(False), "learned with a name": learned(True)}


def parser_of(name: str) -> Parser:
    return ScriptParser(LEARNED[name].script, OFFER, lambda: "an id") if name in LEARNED else tool_parser(name)


def at_every_byte(text: str) -> Iterator[list[str]]:
    """The text in two pieces, as it comes when its bytes are cut: half a character waits for the rest of it."""
    encoded = text.encode()
    for cut in range(len(encoded) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")()
        yield [decoder.decode(encoded[:cut]), decoder.decode(encoded[cut:], final=True)]


def check(make: Callable[[], Parser], text: str, said: list[Said]) -> None:
    whole = read(make(), text)
    assert told(whole) == said
    assert read(make(), *text) == whole
    for pieces in at_every_byte(text):
        assert read(make(), *pieces) == whole, pieces[0]


@pytest.mark.parametrize(
    ("call", "ends"),
    [
        ("<fn={name}>{arguments}</fn>", ("<|eot_id|>", "<|eom_id|>")),  # functionary 3.1
        ('<TOOLS>[{{"name": "{name}", "arguments": {arguments}}}]</TOOLS>', ("\n<S_12>\n", "<S_12>\n\n")),  # Nemotron
    ],
)
def test_what_ends_a_turn_of_calls_is_no_part_of_them(call: str, ends: tuple[str, str]) -> None:
    """It is no text of the answer's, as it stops the model: a call is complete without it."""

    def written(name: str, arguments: Any) -> str:
        return call.format(name=name, arguments=json.dumps(arguments))

    def render(messages: list[dict[str, Any]], tools: list[Any], opened: bool) -> str:
        text = ""
        for message in messages:
            calls = [written(**one["function"]) for one in message.get("tool_calls", ())]
            text += f"<|{message['role']}|>{message['content']}{''.join(calls)}{ends[bool(calls)]}"
        return text + ("<|assistant|>" if opened else "")

    form = learned_form(render)
    assert form is not None
    for end in ("", "" if "S_12" in ends[1] else ends[1]):
        text = written("find_ferry", {"port": "Oslo"}) + end
        check(lambda: ScriptParser(form.script, OFFER, lambda: "an id"), text, [("find_ferry", {"port": "Oslo"})])


NESTED: Call = ("tide", {"when": {"a": [{"b": []}, [1, -2.5, None, True]], "c": {"d": {}}}})
CASES: dict[str, list[Call]] = {
    "one": [("find_ferry", {"port": "Oslo", "cars": 2})],
    "two": [("find_ferry", {"port": "Oslo"}), ("tide", {"when": 3})],
    "quotes": [("find_ferry", {"port": 'say "so", \\ {a} [b]: it\'s, (c); <d>', "stops": ['"', "\\", "}]"]})],
    "nested": [NESTED, NESTED],
    "characters": [
        ("find_ferry", {"port": "Å\u4e2d\u6587\U0001f600 e\u0301", "stops": ["\U0001f468\u200d\U0001f4bb"]})
    ],
    "breaks": [("find_ferry", {"port": "a\n\tb\r\n\nc"})],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_is_read(name: str, case: str) -> None:
    check(lambda: parser_of(name), WRITERS[name](CASES[case]), [*CASES[case]])


@pytest.mark.parametrize("name", WRITERS)
def test_text_and_thoughts_come_first(name: str) -> None:
    calls = CASES["two"]
    if name not in ("JSON", "llama4_pythonic", "openai"):  # whose whole answer is calls, or which has channels
        check(lambda: parser_of(name), f"Let me \u00e9 see: {WRITERS[name](calls)}", ["Let me \u00e9 see:", *calls])
    if name != "openai":
        thought = THOUGHTS["deepseek_r1"]

        def make() -> Parser:
            form = LEARNED[name] if name in LEARNED else TOOL_FORMS[name]
            return parser_with(thought.script("", form.script))

        check(
            make,
            f'<think>A call? {{"\u4e2d": 1}}</think>\n\n{WRITERS[name](calls)}',
            ['(A call? {"\u4e2d": 1})', *calls],
        )


@pytest.mark.parametrize("name", WRITERS)
def test_half_a_call_is_told_as_far_as_it_came(name: str) -> None:
    """Wherever the length cuts it off, nothing raises, no call is lost that was begun, and none is made up."""
    text, calls = WRITERS[name](CASES["two"]), CASES["two"]
    for pieces in at_every_byte(text):
        events: list[ContentEvent] = read(parser_of(name), pieces[0])
        names = [said[0] for said in told(events) if not isinstance(said, str)]
        assert names == [one for one, _ in calls][: len(names)]


def test_every_format_has_a_writer() -> None:
    forms = {id(TOOL_FORMS[name]) for name in WRITERS if name in TOOL_FORMS}
    assert forms == {id(form) for form in TOOL_FORMS.values()}
    assert {name for name in _TOOL_SIGNS.values() if name} <= TOOL_FORMS.keys()


def test_arguments_alone() -> None:
    given = {"port": 'Å "so" \U0001f600', "stops": [], "cars": 2}
    for text in (json.dumps(given), json.dumps(given, ensure_ascii=False, indent=1)):
        check(
            lambda: ScriptParser(json_arguments(FERRY.name).script, OFFER, lambda: "an id"), text, [(FERRY.name, given)]
        )
