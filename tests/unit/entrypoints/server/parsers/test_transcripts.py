"""What each parser makes of a model's text: one table of transcripts, each of them also cut at every character."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_json_script import scan

from quire.entrypoints.server.parsers import thoughts
from quire.entrypoints.server.parsers.base import (
    ContentEvent,
    Function,
    Offer,
    Parser,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    merged,
)
from quire.entrypoints.server.parsers.reader import MAX_NAME, Reads, ScriptParser
from quire.entrypoints.server.parsers.registry import THOUGHT_FORMS, TOOL_FORMS

FERRY = Function(
    "find_ferry",
    {
        "type": "object",
        "properties": {
            "port": {"type": "string"},
            "cars": {"type": "integer"},
            "quiet": {"type": "boolean"},
            "stops": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["port"],
    },
)
TIDE = Function("tide", {"type": "object", "properties": {"when": {"type": ["number", "null"]}}})
OFFER = Offer((FERRY, TIDE))

Said = str | tuple[str, Any]  # text; or a call's name and its arguments, as JSON or (broken off) as text


def call(**arguments: Any) -> tuple[str, Any]:
    return "find_ferry", arguments


OSLO = call(port="Oslo", cars=2)
TRANSCRIPTS: dict[str, list[tuple[str, list[Said]]]] = {
    "hermes": [
        ('<tool_call>\n{"name": "find_ferry", "arguments": {"port": "Oslo", "cars": 2}}\n</tool_call>', [OSLO]),
        (
            'Let me look. \n\n<tool_call>\n{"name": "tide", "arguments": {}}\n</tool_call>\n<tool_call>'
            '{"arguments": {"port": "Å </tool_call> \\u00e9 {}\\"]"}, "name": "find_ferry"}</tool_call>\n',
            ["Let me look.", ("tide", {}), call(port='Å </tool_call> é {}"]')],
        ),
        ('<tool_call>{"name": "tide"}</tool_call> and so on', [("tide", {}), " and so on"]),
        (
            '<tool_call>[{"name": "tide", "arguments": null}, {"name":"find_ferry","arguments":"{\\"port\\":\\"A\\"}"}]'
            "</tool_call>",
            [("tide", {}), call(port="A")],
        ),
        # No calls: each comes back as it was.
        ("Is 3 <tool 4?", ["Is 3 <tool 4?"]),
        ("<tool_call>\nfind_ferry(Oslo)\n</tool_call> ok", ["<tool_call>\nfind_ferry(Oslo)\n</tool_call> ok"]),
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            ['<tool_call>{"name": 3, "arguments": {}}</tool_call>'],
        ),
        (
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            ['<tool_call>{"name": "", "arguments": {}}</tool_call>'],
        ),
        *(
            (text := f'<tool_call>{{"arguments": {arguments}, "name": "tide"}}</tool_call>', [text])
            for arguments in ('"{so"', '"{\\"when\\": NaN}"', '"[1]"', "[1]")
        ),
        ('a <tool_call>{"nam', ['a <tool_call>{"nam']),
        ('<tool_call><tool_call>{"name": "tide"}</tool_call>', ["<tool_call>", ("tide", {})]),
        ('<tool_call>[{"arguments": "", "name": "tide"}, {"name": "tide", "arguments": ""}]', [("tide", {})] * 2),
        # Arguments, or a function, more than once: the first counts.
        ('<tool_call>{"arguments": {"when": 1}, "parameters": 2, "name": "tide"}', [("tide", {"when": 1})]),
        (
            '<tool_call>{"name": "tide", "arguments": {}, "function": {"name": "find_ferry", "arguments": {}}}',
            [("tide", {})],
        ),
        # Broken off, or wrong after it has begun.
        ('<tool_call>{"name": "tide", "arguments": "{\\"when\\": NaN}"}', [("tide", "{"), "}"]),
        ('<tool_call>{"name": "find_ferry", "arguments": {"port": "Os', [("find_ferry", '{"port": "Os')]),
        ('<tool_call>{"name": "tide", "arguments": {"when": 1}}', [("tide", {"when": 1})]),
        ('<tool_call>{"name": "tide", "arguments": {"when": ?}}', [("tide", '{"when": '), "?}}"]),
        # A line break in a string, which JSON can't have.
        ('<tool_call>{"name": "find_ferry", "arguments": {"port": "a\nb\t"}}</tool_call>', [call(port="a\nb\t")]),
        ("  \n", ["  \n"]),
    ],
    "llama3_json": [
        ('{"name": "find_ferry", "parameters": {"port": "Oslo", "cars": 2}}', [OSLO]),
        (
            '\n<|python_tag|>{"name": "tide", "parameters": {}}; {"name": "tide", "parameters": {"when": 1}}',
            [("tide", {}), ("tide", {"when": 1})],
        ),
        ('Well: <|python_tag|>{"type": "function", "name": "tide", "parameters": {}}', ["Well:", ("tide", {})]),
        ('{"type": "function", "function": {"name": "tide", "arguments": {"when": 2}}}', [("tide", {"when": 2})]),
        ('{"name": "Ada", "parameters": {"born": 1815}}', ['{"name": "Ada", "parameters": {"born": 1815}}']),
        ('  {"answer": 42} ', ['  {"answer": 42} ']),
        ('{"name": {"first": "Ada"}}', ['{"name": {"first": "Ada"}}']),
        ("Just words.", ["Just words."]),
    ],
    "llama4_pythonic": [
        ("[find_ferry(port='Oslo', cars=2)]", [OSLO]),
        (
            '<|python_start|>[tide(), find_ferry(port="it\'s, (\\"so\\")", quiet=True, stops=[\'a\', "b"]), '
            "tide(when=-1.5)]"
            "<|python_end|>",
            [("tide", {}), call(port='it\'s, ("so")', quiet=True, stops=["a", "b"]), ("tide", {"when": -1.5})],
        ),
        ("[tide(when=null)]", [("tide", {"when": None})]),
        ("[1](https://ferry.example) is a link", ["[1](https://ferry.example) is a link"]),
        ("[tide(when=open('x'))] no", ["[tide(when=open('x'))] no"]),
        ("[tide(when=1e999)]", ["[tide(when=1e999)]"]),
        ("[tide(when=-1e999)]", ["[tide(when=-1e999)]"]),
        ("[tide(when=1, then=x)] no", [("tide", '{"when": 1'), "then=x)] no"]),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "find_ferry", "arguments": {"port": "Oslo", "cars": 2}}, {"name": "tide", '
            '"arguments": {}}]',
            [OSLO, ("tide", {})],
        ),
        (
            'Hm.[TOOL_CALLS]find_ferry[ARGS]{"port": "Oslo", "cars": 2}[TOOL_CALLS]tide[ARGS]{}',
            ["Hm.", OSLO, ("tide", {})],
        ),
        ('[TOOL_CALLS]find_ferry{"port": "Oslo", "cars": 2}', [OSLO]),
        ('[TOOL_CALLS]tide[CALL_ID]a1b2c3d4e[ARGS]{"when": 3}', [("tide", {"when": 3})]),
        ("[TOOL_CALLS] none at all", ["[TOOL_CALLS] none at all"]),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=find_ferry>\n<parameter=port>\nOslo\n</parameter>\n<parameter=cars>\n2\n"
            "</parameter>\n"
            "</function>\n</tool_call>",
            [OSLO],
        ),
        (
            'I do.\n<function=find_ferry>\n<parameter=port>\n<b>\n"x"\n\n</parameter>\n<parameter=quiet>\nTrue\n'
            "</parameter>\n"
            '<parameter=stops>\n["a"]\n</parameter>\n</function>\n</tool_call>',
            ["I do.", call(port='<b>\n"x"\n', quiet=True, stops=["a"])],
        ),
        ("<tool_call>\n<function=tide>\n</function>\n</tool_call>", [("tide", {})]),
        (
            "<tool_call>\n<function=tide>\n<parameter=when>\nsoon\n</parameter>\n</function></tool_call>",
            [("tide", {"when": "soon"})],
        ),
        ("<tool_call>\nnothing\n</tool_call>", ["<tool_call>\nnothing\n</tool_call>"]),
        ("<function=find_ferry>\n<parameter=port>\nOs", [("find_ferry", '{"port": "Os"')]),
    ],
    "deepseek_v3": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find_ferry\n```json\n"
            '{"port": "Oslo", "cars": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>tide\n'
            "```json\n{}\n"
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [OSLO, ("tide", {})],
        ),
        (
            'So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find_ferry<｜tool▁sep｜>{"port": "Oslo", "cars": 2}'
            "<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            ["So.", OSLO],
        ),
        (
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>tide\nno",
            ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>tide\nno"],
        ),
    ],
    "granite": [
        (
            '<|tool_call|>[{"name": "find_ferry", "arguments": {"port": "Oslo", "cars": 2}}, {"name": "tide", '
            '"arguments": {}}]',
            [OSLO, ("tide", {})],
        ),
        ('<tool_call>\n{"name": "tide", "arguments": {}}\n</tool_call>', [("tide", {})]),
        ("<|tool_call|>[]", ["<|tool_call|>[]"]),
    ],
    "phi4_mini_json": [
        ('functools[{"name": "find_ferry", "arguments": {"port": "Oslo", "cars": 2}}]', [OSLO]),
        ('<|tool_call|>[{"name": "tide", "parameters": {}}]<|/tool_call|>', [("tide", {})]),
        ("functools is a module", ["functools is a module"]),
    ],
    "gemma4": [
        (
            '<|tool_call>call:find_ferry{cars:2,port:<|"|>Oslo<|"|>}<tool_call|>',
            [("find_ferry", {"cars": 2, "port": "Oslo"})],
        ),
        (
            '<|tool_call>call:find_ferry{port:<|"|>a, {b}<|"|>,quiet:true,stops:[<|"|>x<|"|>,<|"|>y<|"|>]}<tool_call|>'
            "<|tool_call>call:tide{when:{a:[],b:-1.5,c:null}}<tool_call|>",
            [call(port="a, {b}", quiet=True, stops=["x", "y"]), ("tide", {"when": {"a": [], "b": -1.5, "c": None}})],
        ),
        ("<start_function_call>call:tide{when:<escape>now<escape>}<end_function_call>", [("tide", {"when": "now"})]),
        ('<|tool_call>call:tide{"when":"so \\"on\\""}<tool_call|>', [("tide", {'"when"': 'so "on"'})]),
        ("<|tool_call>call:tide{when:NaN,a:None}", [("tide", {"when": "NaN", "a": None})]),
        ("<|tool_call>tide()", ["<|tool_call>tide()"]),
    ],
    "glm45": [
        (
            "<tool_call>find_ferry\n<arg_key>port</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>cars</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
            [OSLO],
        ),
        (
            "Yes\n<tool_call>find_ferry<arg_key>port</arg_key><arg_value> <a> </arg_value></tool_call>\n"
            "<tool_call>tide\n</tool_call>",
            ["Yes", call(port=" <a> "), ("tide", {})],
        ),
        ("<tool_call>find_ferry\n<arg_key>port", [("find_ferry", "{"), "port"]),
    ],
    "kimi_k2": [
        (
            "Hm<|tool_calls_section_begin|><|tool_call_begin|>functions.find_ferry:0<|tool_call_argument_begin|>"
            '{"port": "Oslo", "cars": 2}<|tool_call_end|><|tool_call_begin|>functions.tide:1<|tool_call_argumen'
            "t_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            ["Hm", OSLO, ("tide", {})],
        ),
        ("<|tool_call_begin|>oh", ["<|tool_call_begin|>oh"]),
    ],
    "openai": [
        (
            "<|channel|>analysis<|message|>A ferry. <|end|><|start|>assistant<|channel|>commentary to=function"
            "s.find_ferry "
            '<|constrain|>json<|message|>{"port": "Oslo", "cars": 2}<|call|>',
            ["(A ferry.)", OSLO],
        ),
        (" to=functions.tide<|channel|>commentary json<|message|>{}", [("tide", {})]),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>It is "
            "5.\n<|return|>",
            ["I look.\n\nIt is 5.\n"],
        ),
        ("plain <|channel|>", ["plain <|channel|>"]),
        ("<|channel|>final", ["<|channel|>final"]),
        ('<|channel|>commentary to=functions.tide<|message|>{"a": ]}<|call|>', [("tide", '{"a": '), "]}"]),
    ],
}
THOUGHTS: dict[str, list[tuple[str, str, list[Said]]]] = {  # with the prompt's end
    "deepseek_r1": [
        ("", "I wonder.\n</think>\n\nYes.", ["(I wonder.)", "Yes."]),
        ("<think>\n", "<think>I wonder.</think>Yes.", ["(I wonder.)", "Yes."]),
        ("", "No end </thin", ["(No end </thin)"]),
        ("<think>\n\n</think>\n\n", "Yes.", ["Yes."]),
    ],
    "qwen3": [
        ("", "<think>\nI wonder < 3.\n\n</think>\n\n Yes.\n", ["(I wonder < 3.)", "Yes.\n"]),
        ("", " No thought </think>.", [" No thought </think>."]),
        ("<think>", "I wonder</think>", ["(I wonder)"]),
        ("<think></think>", "<think>x", ["<think>x"]),
        ("", "<think>\n\n</think>\n\nYes", ["Yes"]),
    ],
    "granite": [
        ("", "Here is my thought process: hm.\nHere is my response: Yes.", ["(hm.)", "Yes."]),
        ("", "<think>hm</think><response>Yes.</response>", ["(hm)", "Yes."]),
        ("", "Here is my thoughts", ["Here is my thoughts"]),
    ],
    "mistral": [("", "[THINK]hm[/THINK]Yes", ["(hm)", "Yes"])],
    "gemma4": [("", "<|channel>thought\nhm\n<channel|>Yes", ["(hm)", "Yes"])],
}


def tool_parser(name: str) -> Parser:
    return parser_of(TOOL_FORMS[name].script)


def parser_of(script: Reads) -> Parser:
    numbers = itertools.count()
    return ScriptParser(script, OFFER, lambda: f"chatcmpl{next(numbers):04}")


def told(events: list[ContentEvent]) -> list[Said]:
    """Events in the table's form; that calls are numbered and ended in order is checked."""
    said: list[Said] = []
    name, pieces, number = None, list[str](), -1
    for event in events:
        assert not any(value == "" for value in (getattr(event, "text", 1), getattr(event, "arguments", 1))), "empty"
        match event:
            case TextDelta(text):
                assert name is None
                said.append(text)
            case ReasoningDelta(text):
                said.append(f"({text})")
            case ToolCallStart(n, id, function):
                assert (name, n) == (None, number + 1)
                assert id
                name, number, pieces = function, n, []
            case ToolCallDelta(n, arguments):
                assert n == number
                pieces.append(arguments)
            case ToolCallEnd(n):
                assert n == number
                assert name is not None
                assert pieces, "a call has arguments"
                said.append((name, _read("".join(pieces))))
                name = None
    assert name is None, "the call was not ended"
    return said


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read(parser: Parser, *pieces: str, is_cut: bool = False) -> list[ContentEvent]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.finish(is_cut))


CASES = [(name, text, said) for name, table in TRANSCRIPTS.items() for text, said in table]


@pytest.mark.parametrize(("name", "text", "said"), CASES)
def test_calls(name: str, text: str, said: list[Said]) -> None:
    whole = read(tool_parser(name), text)
    assert told(whole) == said
    assert read(tool_parser(name), *text) == whole
    for cut in range(len(text) + 1):
        assert read(tool_parser(name), text[:cut], text[cut:]) == whole, text[:cut]


@pytest.mark.parametrize(
    ("name", "prompt", "text", "said"), [(name, *case) for name, table in THOUGHTS.items() for case in table]
)
def test_thoughts(name: str, prompt: str, text: str, said: list[Said]) -> None:
    form = THOUGHT_FORMS[name]
    assert form is not None

    def parser() -> Parser:
        return ScriptParser(form.script(prompt), OFFER, str)

    whole = read(parser(), text)
    assert told(whole) == said
    for cut in range(len(text) + 1):
        assert read(parser(), text[:cut], text[cut:]) == whole, text[:cut]


@pytest.mark.parametrize("name", TOOL_FORMS)
def test_any_beginning_of_a_transcript_ends_well(name: str) -> None:
    """Whatever the length cuts off: nothing raises, and every call has its end."""
    texts = [text for text, _ in TRANSCRIPTS.get(name, [])]
    for text in texts:
        for cut in range(len(text)):
            told(read(tool_parser(name), *text[:cut]))


SHARDS = [
    '{"name": "tide", "arguments": {',
    '"port": "Os',
    "lo\\n",
    '"}',
    "}",
    "]",
    "[",
    "tide",
    "(when=1",
    ")",
    ",",
    ";",
    ":",
    " ",
    "\n",
]
SHARDS += [
    "call:tide{",
    "a:",
    "1",
    "null",
    "<function=tide>",
    "<parameter=when>",
    "</parameter>",
    "</function>",
    "```json",
    "x",
]


FORMS = sorted({id(form): name for name, form in TOOL_FORMS.items()}.values())


def mutants(name: str) -> st.SearchStrategy[str]:
    """Rubbish, and what models write with something left out, repeated or put in between."""
    form = TOOL_FORMS[name]
    real = [text for one, table in TRANSCRIPTS.items() if TOOL_FORMS[one] is form for text, _ in table]
    shards = st.sampled_from([*SHARDS, *form.marks * 2])

    @st.composite
    def mutant(draw: st.DrawFn) -> str:
        text = draw(st.sampled_from(real))
        for shard in draw(st.lists(shards | st.just(""), max_size=3)):
            start, end = (draw(st.integers(0, len(text))) for _ in range(2))  # in either order
            text = text[:start] + shard + text[end:]
        return text

    return mutant() | st.lists(shards, max_size=14).map("".join)


@given(st.data())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", FORMS)
def test_a_mutant_is_read_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    """And arguments are JSON as far as they go, and whatever is said besides calls was written."""
    text, is_cut = data.draw(mutants(name)), data.draw(st.booleans())
    whole = read(tool_parser(name), text, is_cut=is_cut)
    said = told(whole)
    for arguments in (one[1] for one in said if isinstance(one, tuple) and isinstance(one[1], str)):
        assert scan(arguments)[0].removesuffix("...") == arguments
    assert read(tool_parser(name), *text, is_cut=is_cut) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert read(tool_parser(name), text[:cut], text[cut:], is_cut=is_cut) == whole
    calls_or_thinks = any(isinstance(event, ToolCallStart | ReasoningDelta) for event in whole)
    if not calls_or_thinks and not is_cut and name not in UNMARKED:
        assert said == ([text] if text else [])


@given(st.data())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", thoughts.FORMS)
def test_thoughts_before_a_mutant_are_told_apart_however_they_are_cut(name: str, data: st.DataObject) -> None:
    form, calls = THOUGHT_FORMS[name], data.draw(st.sampled_from(FORMS))
    tags = [*form.opens, *form.closes, *(form.around or ())]
    prompt = data.draw(st.sampled_from(["", form.opens[0], form.opens[0] + form.closes[0]]))
    lead = data.draw(st.lists(st.sampled_from([*tags, "hm", " ", "\n", "<", tags[0][:-1]]), max_size=6))
    text, is_cut = "".join(lead) + data.draw(mutants(calls)), data.draw(st.booleans())

    def parsed(*pieces: str) -> list[ContentEvent]:
        parser = parser_of(form.script(prompt, TOOL_FORMS[calls].script))
        return read(parser, *pieces, is_cut=is_cut)

    whole = parsed(text)
    told(whole)
    assert parsed(*text) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert parsed(text[:cut], text[cut:]) == whole


def test_an_endless_name_is_none_however_it_is_cut() -> None:
    text = f"<|tool_call_begin|>functions.tide:0{' ' * MAX_NAME}<|tool_call_argument_begin|>{{}}"
    assert told(read(tool_parser("kimi_k2"), text)) == [text] == told(read(tool_parser("kimi_k2"), *text))


def test_arguments_nested_too_deeply_in_a_text_are_none() -> None:
    deep = json.dumps('{"a":' * 2000)
    text = f'<tool_call>{{"arguments": {deep}, "name": "tide"}}</tool_call>'
    assert told(read(tool_parser("hermes"), text)) == [text]


UNMARKED = ("openai", "gpt-oss", "kimi_k2", "deepseek_v3", "deepseek_v31")  # their marks are dropped without a call


def test_a_call_is_told_before_it_is_complete() -> None:
    parser = tool_parser("hermes")
    assert parser.push('<tool_call>{"name": "find_ferry", "arguments": {"po') == [
        ToolCallStart(0, "chatcmpl0000", "find_ferry"),
        ToolCallDelta(0, '{"po'),
    ]
    assert parser.push('rt": "Os') == [ToolCallDelta(0, 'rt": "Os')]
    assert parser.push('lo"}}') == [ToolCallDelta(0, 'lo"}'), ToolCallEnd(0)]


def test_text_arguments_come_as_they_are_written() -> None:
    parser = tool_parser("qwen3_coder")
    parser.push("<function=find_ferry><parameter=port>Os")
    assert parser.push('lo "x') == [ToolCallDelta(0, 'lo \\"x')]


@pytest.mark.parametrize(
    "schema", [{"anyOf": 3}, {"oneOf": {"a": 1}}, {"enum": 3}, {"type": {}}, 3, {"anyOf": [3]}], ids=str
)
def test_a_schema_that_is_none_tells_nothing_of_types(schema: Any) -> None:
    offer = Offer((Function("tide", {"properties": {"when": schema}}),))
    text = "<function=tide><parameter=when>1</parameter></function>"
    assert told(read(ScriptParser(TOOL_FORMS["qwen3_coder"].script, offer, lambda: "an id"), text)) == [
        ("tide", {"when": 1})
    ]


TEXT_OR_NOTHING = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "written", "meant"),
    [
        *((TEXT_OR_NOTHING, text, text) for text in ("42", "true", "-1.5", '{"a": 1}', "[]", "    return 1", "no: [")),
        *((TEXT_OR_NOTHING, text, None) for text in ("null", "None")),
        (TEXT_OR_NOTHING, '"42"', "42"),
        ({"type": ["string", "integer"]}, "42", 42),
        ({"type": ["string", "number"]}, "42", 42),
        ({"type": ["string", "integer"]}, "4.2", "4.2"),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"type": ["string", "boolean"]}, "True", True),
        ({"type": ["string", "array"]}, '["a"]', ["a"]),
        ({"type": ["integer", "null"]}, " None ", None),
    ],
    ids=str,
)
def test_what_may_be_text_is_text_unless_it_is_of_another_kind(schema: Any, written: str, meant: Any) -> None:
    offer = Offer((Function("tide", {"properties": {"when": schema}}),))
    for name, text in (
        ("qwen3_coder", f"<function=tide>\n<parameter=when>\n{written}\n</parameter>\n</function>"),
        ("glm45", f"<tool_call>tide<arg_key>when</arg_key><arg_value>{written}</arg_value></tool_call>"),
    ):
        whole = read(ScriptParser(TOOL_FORMS[name].script, offer, lambda: "an id"), text)
        assert told(whole) == [("tide", {"when": meant})]
        assert read(ScriptParser(TOOL_FORMS[name].script, offer, lambda: "an id"), *text) == whole


@pytest.mark.parametrize("cut", ["<|channel|>", "<|channel|>analy", "<|start|>assistant<|channel|>comm"])
def test_a_header_that_the_length_cuts_is_no_text(cut: str) -> None:
    """Nor is one after a thought."""
    assert told(read(tool_parser("openai"), cut, is_cut=True)) == []
    thought, later = "<|channel|>analysis<|message|>Hm.<|end|>", cut.replace("<|channel|>", "<|start|>", 1)
    assert told(read(tool_parser("openai"), thought + later, is_cut=True)) == ["(Hm.)"]
    assert told(read(tool_parser("openai"), cut)) == [cut]


def test_ids_are_of_the_formats_own_kind() -> None:
    (start, *_) = read(tool_parser("mistral"), "[TOOL_CALLS]tide[ARGS]{}")
    assert isinstance(start, ToolCallStart)
    assert len(start.id) == 9
    (start, *_) = read(tool_parser("mistral"), "[TOOL_CALLS]tide[CALL_ID]a1b2c3d4e[ARGS]{}")
    assert isinstance(start, ToolCallStart)
    assert start.id == "a1b2c3d4e"
    section = "<|tool_calls_section_begin|><|tool_call_begin|>functions.tide:7<|tool_call_argument_begin|>{}"
    (start, *_) = read(tool_parser("kimi_k2"), section)
    assert isinstance(start, ToolCallStart)
    assert start.id == "functions.tide:7"


# Where a call may begin with what an answer in JSON begins with, a beginning is shown.
_AMBIGUOUS = ("openai", "llama3_json", "llama4_pythonic", "phi4_mini_json", "granite", "generic")


@pytest.mark.parametrize("name", [name for name in TRANSCRIPTS if name not in _AMBIGUOUS])
def test_what_begins_a_call_is_no_text_where_the_tokens_did_not_suffice(name: str) -> None:
    def text_of(events: list[ContentEvent]) -> str:
        return "".join(event.text for event in events if isinstance(event, TextDelta))

    for text, _ in TRANSCRIPTS[name]:
        whole = tool_parser(name)
        full = text_of(whole.push(text) + whole.finish())
        for end in range(len(text)):
            parser, pieces = tool_parser(name), tool_parser(name)
            cut = merged(parser.push(text[:end]) + parser.finish(cut=True))
            streamed = [event for letter in text[:end] for event in pieces.push(letter)] + pieces.finish(cut=True)
            assert told(cut) == told(merged(streamed)), text[:end]
            said = text_of(cut)
            assert full.startswith((said.rstrip(), said.rstrip()[:-3].rstrip())), (text[:end], said)


def test_a_call_that_is_cut_off() -> None:
    def cut(text: str, offer: Offer = OFFER, name: str = "hermes") -> list[Said]:
        parser = ScriptParser(TOOL_FORMS[name].script, offer, lambda: "c")
        return told(merged(parser.push(text) + parser.finish(cut=True)))

    assert cut("\n<tool_call") == []
    assert cut('I look.\n<tool_call>\n{"name": "find_fe') == ["I look."]
    assert cut("a <to") == ["a <to"]
    assert cut("<t", Offer((TIDE,), "required")) == cut("<t", Offer((TIDE,), "required", "tide")) == []
    assert cut("a <tool 4") == ["a <tool 4"]
    required = Offer((TIDE,), "required")
    assert cut("<\ufffd", required, "deepseek_v3") == cut("<｜tool\ufffd", required, "deepseek_v3") == []
    assert cut("<｜tool\ufffd", name="deepseek_v3") == []
    assert cut("<\ufffd", name="deepseek_v3") == ["<\ufffd"]
    assert cut("I look \ufffd", name="deepseek_v3") == ["I look \ufffd"]
    assert cut('<tool_call>{"name": "tide", "arguments": {"when"') == [("tide", '{"when"')]
    assert cut('<tool_call>{"name": "tide", "arguments": {}}</tool_') == [("tide", {})]
    assert cut('{"name": "ti', name="llama3_json") == ['{"name": "ti']
    assert cut('{"name": "tide", "para', name="llama3_json") == cut('<|python_tag|>{"na', name="llama3_json") == []
    assert cut('{"name": "tides", "para', name="llama3_json") == ['{"name": "tides", "para']
    assert cut("[tide(whe", name="pythonic") == cut("<|python_start|>[ti", name="pythonic") == []
    assert cut("[tides(whe", name="pythonic") == ["[tides(whe"]
    assert cut('{"name": "ti', Offer((TIDE,), "required"), "llama3_json") == []
