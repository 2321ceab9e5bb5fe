"""What a grammar lets a model write of a format is what the format's parser reads, and the tools' schemas hold."""

import itertools
import json
import random
from typing import Any

import pytest

from quire.entrypoints.server.parsers.base import Function, Offer, Parser, ToolCallDelta, ToolCallStart, merged
from quire.entrypoints.server.parsers.forms import Form
from quire.entrypoints.server.parsers.generic import JSON_CALLS, json_arguments
from quire.entrypoints.server.parsers.grammars import Answer, Thought, answer_grammar
from quire.entrypoints.server.parsers.reader import ScriptParser
from quire.entrypoints.server.parsers.registry import THOUGHT_FORMS, TOOL_FORMS
from quire.errors import InvalidRequestError
from quire.structured_outputs import StructuredOutputsParams

llguidance = pytest.importorskip("llguidance")

COLOUR = {"type": "string", "enum": ["red", "sea green"]}
PAINT = Function(
    "paint",
    {
        "type": "object",
        "properties": {
            "colour": COLOUR,
            "coats": {"type": "integer", "minimum": 1, "maximum": 9},
            "dry": {"type": "boolean"},
            "words": {"type": "array", "items": COLOUR, "minItems": 1, "maxItems": 2},
        },
        "required": ["coats", "words"],
        "additionalProperties": False,
    },
)
STOP = Function("stop", {"type": "object", "properties": {}, "additionalProperties": False})
BOTH = (PAINT, STOP)
TEMPLATES = {  # for formats that have several, a sign of each
    "mistral": ["[ARGS]", "[CALL_ID] [ARGS]", "[TOOL_CALLS][", "[TOOL_CALLS]name{"],
    "deepseek_v3": ["```json", ""],
    "granite": ["", "<tool_call>"],
    "gemma": ["", "<start_function_call> <escape>"],
    "glm45": ["", "<tool_call>{function-name}\n"],
}
FORMS = {id(form): (name, form) for name, form in reversed(TOOL_FORMS.items())}
CASES = [(name, form, sign) for name, form in FORMS.values() for sign in TEMPLATES.get(name, [""])]
CASES += [("generic", JSON_CALLS, "")]


MARKS = sorted({mark for form in TOOL_FORMS.values() for mark in form.marks} | {"<think>", "</think>"})


def tokenizer_with(marks: list[str]) -> Any:
    """One that has the bytes as tokens, and these marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made.add_special_tokens(["<end>", *marks])
    return made


class Walk:
    """A model that writes at random what a grammar allows."""

    def __init__(self, marks: list[str]) -> None:
        tokenizer = self._tokenizer = tokenizer_with(marks)
        self.tokens = {mark: tokenizer.token_to_id(mark) for mark in marks}
        self._guide = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("<end>"))

    def matcher(self, grammar: str) -> Any:
        matcher = llguidance.LLMatcher(self._guide, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert not matcher.get_error(), grammar
        return matcher

    def write(self, grammar: str, seed: int, most: int = 4000) -> str:
        """A whole answer, of printable characters; fails where the grammar leads into a dead end."""
        matcher, chance, ids = self.matcher(grammar), random.Random(seed), list[int]()
        end = self._tokenizer.token_to_id("<end>")
        while not matcher.is_stopped() and len(ids) < most:
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(self._tokenizer.get_vocab_size()) if mask[i // 8] >> i % 8 & 1]
            assert allowed, self._tokenizer.decode(ids, skip_special_tokens=False)
            usual = [i for i in allowed if i == end or i > 256 or self._tokenizer.decode([i]).isprintable()]
            chosen = end if end in allowed and chance.random() < 0.5 else chance.choice(usual or allowed)
            assert matcher.consume_token(chosen)
            if chosen != end:
                ids.append(chosen)
        assert matcher.is_stopped(), "it did not come to an end"
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = self.matcher(grammar)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module", params=[MARKS, []], ids=["marks are tokens", "marks are text"])
def walk(request: pytest.FixtureRequest) -> Walk:
    return Walk(request.param)


def calls_of(parser: Parser, text: str) -> list[tuple[str, Any]]:
    """The calls in a text that is nothing else."""
    found: list[tuple[str, str]] = []
    for event in merged(parser.push(text) + parser.finish()):
        match event:
            case ToolCallStart(_, _, name):
                found.append((name, ""))
            case ToolCallDelta(_, arguments):
                found[-1] = found[-1][0], found[-1][1] + arguments
            case _:
                assert not getattr(event, "text", ""), (text, event)
    return [(name, json.loads(arguments)) for name, arguments in found]


def parser_of(form: Form, offer: Offer) -> Parser:
    numbers = itertools.count()
    return ScriptParser(form.script, offer, lambda: f"call{next(numbers):09}")


def check_arguments(name: str, arguments: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(arguments, {function.name: function for function in BOTH}[name].parameters)


@pytest.mark.parametrize(("name", "form", "sign"), CASES, ids=[f"{name} {sign!r}" for name, _, sign in CASES])
def test_what_is_required_comes_and_is_read(walk: Walk, name: str, form: Form, sign: str) -> None:
    offer = Offer(BOTH, "required")
    grammar = answer_grammar(Answer(offer=offer, frame=form.frame_for(sign)), walk.tokens)
    assert grammar is not None
    seen: set[tuple[str, ...]] = set()
    for seed in range(4):
        text = walk.write(grammar, seed)
        calls = calls_of(parser_of(form, offer), text)
        assert calls, text
        for called, arguments in calls:
            check_arguments(called, arguments)
        seen.add(tuple(called for called, _ in calls))
    assert len(seen) > 1, "always the same"


@pytest.mark.parametrize(("name", "form", "sign"), CASES, ids=[f"{name} {sign!r}" for name, _, sign in CASES])
def test_one_that_is_named_comes_once(walk: Walk, name: str, form: Form, sign: str) -> None:
    offer = Offer(BOTH, "required", named="paint")
    grammar = answer_grammar(Answer(offer=offer, frame=form.frame_for(sign)), walk.tokens)
    assert grammar is not None
    ((called, arguments),) = calls_of(parser_of(form, offer), walk.write(grammar, 1))
    assert called == "paint"
    check_arguments(called, arguments)


@pytest.mark.parametrize("name", ["hermes", "phi4_mini_json", "mistral", "qwen3_coder", "llama3_json"])
def test_free_text_goes_on_as_it_likes_and_calls_hold(walk: Walk, name: str) -> None:
    form = TOOL_FORMS[name]
    frame = form.frame_for("")
    offer = Offer((PAINT,), closed=True, parallel=False)
    grammar = answer_grammar(Answer(offer=offer, frame=frame), walk.tokens)
    one = answer_grammar(Answer(offer=Offer((PAINT,), "required", "paint"), frame=frame), walk.tokens)
    assert grammar is not None
    assert one is not None
    call = walk.write(one, 5)
    assert walk.accepts(grammar, "No need.")
    assert walk.accepts(grammar, call)
    assert walk.accepts(grammar, "Look: " + call)
    assert not walk.accepts(grammar, call + call)
    assert not walk.accepts(grammar, call.replace("paint", "print"))
    assert not walk.accepts(grammar, call.replace("coats", "coat"))


def test_objects_within_arguments_are_closed_too(walk: Walk) -> None:
    within = {"type": "object", "properties": {"x": COLOUR}, "required": ["x"]}
    offer = Offer((Function("f", {"properties": {"a": within}}),), "required", named="f")
    grammar = answer_grammar(Answer(offer=offer, frame=json_arguments("f").frame_for("")), walk.tokens)
    assert grammar is not None
    assert walk.accepts(grammar, '{"a": {"x": "red"}}')
    assert not walk.accepts(grammar, '{"a": {"x": "red", "y": 1}}')
    assert not walk.accepts(grammar, '{"a": {"x": "red"}, "b": 1}')


def test_arguments_alone(walk: Walk) -> None:
    form, offer = json_arguments("paint"), Offer(BOTH, "required", named="paint")
    grammar = answer_grammar(Answer(offer=offer, frame=form.frame_for("")), walk.tokens)
    assert grammar is not None
    ((name, arguments),) = calls_of(parser_of(form, offer), walk.write(grammar, 3))
    assert name == "paint"
    check_arguments(name, arguments)


def thought(budget: int | None, opening: str = "<think>") -> Thought:
    return Thought(opening, "</think>", budget=budget, optional=bool(opening))


JSON = StructuredOutputsParams(json={"type": "object", "properties": {"a": COLOUR}, "required": ["a"]})


def test_a_constraint_holds_after_the_thought(walk: Walk) -> None:
    grammar = answer_grammar(Answer(content=JSON, thought=thought(None)), walk.tokens)
    assert grammar is not None
    assert walk.accepts(grammar, '<think>{so} it is</think>\n\n{"a": "red"}')
    assert walk.accepts(grammar, '{"a": "red"}')
    assert not walk.accepts(grammar, "<think>{so} it is</think>\n\nred")
    assert not walk.accepts(grammar, '<think>{"a": "red"}')


def test_how_json_is_spaced_holds_after_the_thought_too(walk: Walk) -> None:
    for fields, good, bad in [
        ({"disable_any_whitespace": True}, '{"a":"red"}', '{"a": "red"}'),
        ({"whitespace_pattern": "_?"}, '{"a":_"red"}', '{"a": "red"}'),
        ({"disable_additional_properties": True}, '{"a": "red"}', '{"a": "red", "b": 1}'),
        ({}, '{"a": "red"}', '{"a": "red", "b": 1}'),
    ]:
        params = StructuredOutputsParams(json=JSON.json, **fields)
        grammar = answer_grammar(Answer(content=params, thought=thought(None)), walk.tokens)
        assert grammar is not None
        assert walk.accepts(grammar, f"<think>so</think>{good}")
        assert not walk.accepts(grammar, f"<think>so</think>{bad}")


def test_a_thought_has_its_budget() -> None:
    walk = Walk(MARKS)
    grammar = answer_grammar(Answer(thought=Thought("", "</think>", budget=4, never=[256])), walk.tokens)
    assert grammar is not None
    assert walk.accepts(grammar, "hm a</think> and so on, and so on")
    assert walk.accepts(grammar, "h</think>Yes")
    assert walk.accepts(grammar, "</think>Yes")
    assert not walk.accepts(grammar, "hm a b</think>")
    assert not walk.accepts(grammar, "hm<end></think>")
    none = answer_grammar(Answer(thought=thought(0, "")), walk.tokens)
    assert none is not None
    assert walk.accepts(none, "</think>Yes")
    assert not walk.accepts(none, "h</think>Yes")


def test_tools_after_a_thought() -> None:
    walk = Walk(MARKS)
    offer, form = Offer(BOTH, "required"), TOOL_FORMS["hermes"]
    grammar = answer_grammar(Answer(offer=offer, frame=form.frame_for(""), thought=thought(6)), walk.tokens)
    assert grammar is not None
    reader = THOUGHT_FORMS["qwen3"]
    for seed in range(6):
        text = walk.write(grammar, seed)
        events = ScriptParser(reader.script("", form.script), offer, str)
        names = [event.name for event in events.push(text) + events.finish() if isinstance(event, ToolCallStart)]
        assert names, text


def test_a_schema_or_a_call(walk: Walk) -> None:
    offer, form = Offer((STOP,)), TOOL_FORMS["hermes"]
    grammar = answer_grammar(Answer(content=JSON, offer=offer, frame=form.frame_for("")), walk.tokens)
    assert grammar is not None
    assert walk.accepts(grammar, '{"a": "red"}')
    assert walk.accepts(grammar, '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')
    assert not walk.accepts(grammar, "red")


def test_a_regex_or_a_call_after_a_thought() -> None:
    walk = Walk(MARKS)
    offer, form = Offer((STOP,)), TOOL_FORMS["hermes"]
    content = StructuredOutputsParams(regex="[ab]{2}/|x")
    answer = Answer(content=content, offer=offer, frame=form.frame_for(""), thought=thought(3))
    grammar = answer_grammar(answer, walk.tokens)
    assert grammar is not None
    for text in ("ab/", "x", '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'):
        assert walk.accepts(grammar, text)
        assert walk.accepts(grammar, f"<think>hm</think>\n\n{text}")
    assert not walk.accepts(grammar, "abc")
    with pytest.raises(InvalidRequestError, match="after the last backslash"):
        answer_grammar(Answer(content=StructuredOutputsParams(regex="a\\"), thought=thought(3)), walk.tokens)


def test_harmony(walk: Walk) -> None:
    form = THOUGHT_FORMS["openai_gptoss"]
    channel = Thought(form.opens[0], form.closes[0], form.answer, optional=True)
    grammar = answer_grammar(Answer(content=JSON, thought=channel), walk.tokens)
    assert grammar is not None
    assert walk.accepts(
        grammar,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>" + '{"a": "red"}',
    )
    assert not walk.accepts(grammar, "<|channel|>final<|message|>red")


@pytest.mark.parametrize("constraint", [{"structural_tag": '{"format": 3}'}, {"grammar": 'start: "a"'}])
def test_what_can_not_be_part_of_a_grammar(constraint: dict[str, Any], walk: Walk) -> None:
    assert answer_grammar(Answer(StructuredOutputsParams(**constraint), thought=thought(3)), walk.tokens) is None
