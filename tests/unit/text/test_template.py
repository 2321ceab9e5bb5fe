"""ChatTemplate: messages checked and shaped, names given to templates, errors, continue_final_message."""

import sys
from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.text.sandbox import Sandbox
from quire.text.template import RESERVED_NAMES, ChatTemplate, iterates_content

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m['content'] %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}


def render(template: str, messages: Any, **options: Any) -> str:
    options.setdefault("add_generation_prompt", False)
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def refused(template: str, messages: Any, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        render(template, messages, **options)
    return caught.value


def test_generation_prompt() -> None:
    assert render(PLAIN, [USER]) == "[user]Hi</s>"
    assert render(PLAIN, [USER], add_generation_prompt=True) == "[user]Hi</s>[assistant]"


def test_names_given_to_templates() -> None:
    assert render("{{ bos_token }}{{ eos_token }}", [USER]) == "<s></s>"
    assert render("{{ tools[0].a | tojson }}", [USER], tools=[{"a": "<é>"}]) == '"<é>"'
    assert render("{{ tools | tojson(indent=1) }}", [USER], tools=[{"a": 1}]) == '[\n {\n  "a": 1\n }\n]'
    assert render("{{ documents[0].t }}{{ tools is none }}", [USER], documents=[{"t": "T"}]) == "TTrue"
    assert render("{{ enable_thinking }}", [USER], chat_template_kwargs={"enable_thinking": False}) == "False"
    assert len(render("{{ strftime_now('%Y') }}", [USER])) == 4
    assert render("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", [USER]) == "012"
    assert render("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", [USER]) == "1"
    assert render("{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}", [USER]) == "2"
    assert render("{{ dict(a=1) }}{{ dict.fromkeys('b') }}", [USER]) == "{'a': 1}{'b': None}"
    assert render("a\n  {% if true %}\n  b\n  {% endif %}\nc", [USER]) == "a\n  b\nc", "blocks leave no lines"


def test_content_parts() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]}
    assert render(PLAIN, [message]) == "[user]a\nb\nc</s>"
    assert render(PARTS, [message]) == "[user](a)(b)(c)"
    assert render(PARTS, [USER]) == "[user]Hi"
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {"type": "video"}):
        error = refused(PLAIN, [USER, {"role": "user", "content": [part]}])
        assert error.param == "messages"
        assert "messages[1].content[0]" in str(error)
        assert "text only" in str(error)


EACH = "{% for m in messages %}BODY{% endfor %}"
PART_LOOP = "{% for p in EXPR %}{% endfor %}"
MACRO = "{% macro f(x) %}" + PART_LOOP.replace("EXPR", "x") + "{% endmacro %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, False),
        (PARTS, True),
        (EACH.replace("messages", "messages[1:]").replace("BODY", PART_LOOP.replace("EXPR", "m.content")), True),
        (EACH.replace("BODY", "{% set c = m['content'] %}" + PART_LOOP.replace("EXPR", "c")), True),
        ("{% set l = messages | list %}" + PART_LOOP.replace("EXPR", "l[0].content[1:]"), True),
        (MACRO + EACH.replace("BODY", "{{ f(m.content) }}"), True),
        (MACRO + EACH.replace("BODY", "{{ f(m.tools) }}"), False),
        (EACH.replace("BODY", PART_LOOP.replace("EXPR", "m.get('content', '')")), True),
        ("{% set ns = namespace(c=0) %}{% set ns.c = messages[0].content %}" + PART_LOOP.replace("EXPR", "ns.c"), True),
        (EACH.replace("BODY", PART_LOOP.replace("EXPR", "m.tool_calls")), False),
        ("{% for t in tools %}" + PART_LOOP.replace("EXPR", "t.content") + "{% endfor %}", False),
    ],
)
def test_detection_of_parts(template: str, expected: bool) -> None:
    assert iterates_content(Sandbox().from_string(template)) is expected


def test_tool_calls() -> None:
    show = EACH.replace("BODY", "{{ m.tool_calls[0].function.arguments.x if m.tool_calls }}{{ m.content is defined }};")
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert render(show, [USER, called]) == "True;[1, 'é']False;"
    assert CALL["function"]["arguments"] == '{"x": [1, "é"]}', "the caller's messages are left alone"
    for empty in (None, "", {}):
        call = CALL | {"function": {"name": "f", "arguments": empty}}
        shown = render("{{ messages[0].tool_calls[0].function.arguments }}", [called | {"tool_calls": [call]}])
        assert shown == "{}"
    for cut in ('{"x": "', "[1]", "5"):  # whoever has such a call in its history could never go on
        call = CALL | {"function": {"name": "f", "arguments": cut}}
        items = "{% for k, v in messages[0].tool_calls[0].function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
        assert render(items, [called | {"tool_calls": [call]}]) == f"invalid_json={cut}"
    assert render("{{ messages[0].tool_calls is defined }}", [USER | {"tool_calls": []}]) == "False"


def test_calls_without_content_where_a_template_reads_it() -> None:
    """Clients send null; a template that can't do without content gets None, or else an empty text."""
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    name = "{{ m.tool_calls[0].function.name }}"
    asks = EACH.replace("BODY", "{% if m.content is none %}" + name + "{% else %}{{ m.content + '|' }}{% endif %}")
    assert render(asks, [USER, called]) == "Hi|f"
    text = "{{ m.content + '|' + m.tool_calls[0].function.arguments if m.tool_calls }}"
    assert render(EACH.replace("BODY", text), [USER, called]) == '|{"x": [1, "é"]}'
    cut = {"role": "assistant", "content": None, "reasoning": "hm"}
    assert render(EACH.replace("BODY", "{{ m.content.split('x') }};"), [USER, cut, USER]) == "['Hi'];[''];['Hi'];"
    nothing = {"role": "assistant", "content": None}  # the thoughts, which took all tokens, are not sent back
    assert render(EACH.replace("BODY", "{{ m.content + '|' }}"), [USER, nothing, USER]) == "Hi||Hi|"
    assert "never" in str(refused("{{ messages[1].content + raise_exception('never') }}", [USER, called]))


def test_a_refusal_is_what_an_assistant_said() -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "Well,"}, {"type": "refusal", "refusal": "no"}]}
    assert render(EACH.replace("BODY", "{{ m.content }};"), [USER, said]) == "Hi;Well,\nno;"


def test_reasoning_has_all_its_names() -> None:
    show = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert render(show, [{"role": "assistant", "content": "x", name: "why"}]) == "whywhy"


class _Model:
    def model_dump(self) -> dict[str, Any]:
        return {"role": "user", "content": "dumped"}


def test_objects_of_client_libraries() -> None:
    assert render(PLAIN, [_Model()]) == "[user]dumped</s>"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ("Hi", "list"),
        (None, "list"),
        (["Hi"], "messages[0] is a str"),
        ([USER, 5], "messages[1] is a int"),
        ([{"content": "x"}], "needs a role"),
        ([{"role": "", "content": "x"}], "needs a role"),
        ([{"role": 3, "content": "x"}], "needs a role"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": None}], "no content"),
        ([USER, {"role": "tool", "content": None}], "messages[1] has no content"),
        ([{"role": "user", "content": 7}], "messages[0].content must be"),
        ([{"role": "user", "content": [7]}], "'int'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs a string"),
        ([{"role": "assistant", "content": [{"type": "refusal", "text": "No"}]}], "needs a string 'refusal'"),
        ([{"role": "user", "content": [{"type": "riddle"}]}], "'riddle'"),
        ([{"role": "user", "content": object()}], "object"),
    ],
)
def test_bad_messages(messages: Any, words: str) -> None:
    error = refused(PLAIN, messages)
    assert words in str(error)
    assert error.param == "messages"
    assert " at 0x" not in str(error)


def test_nested_too_deeply() -> None:
    deep: Any = "x"
    for _ in range(sys.getrecursionlimit() * 2):
        deep = [deep]
    assert "nested too deeply" in str(refused(PLAIN, [USER | {"extra": deep}]))
    assert refused(PLAIN, [USER], chat_template_kwargs={"deep": deep}).param == "chat_template_kwargs"


def test_bad_tools_and_documents() -> None:
    assert refused(PLAIN, [USER], tools=["f"]).param == "tools"
    assert refused(PLAIN, [USER], tools={"name": "f"}).param == "tools"
    assert refused(PLAIN, [USER], tools=[len]).param == "tools"
    assert refused(PLAIN, [USER], documents=["text"]).param == "documents"


@pytest.mark.parametrize("given", [5, "", "x", [], [("x", 1)]])
def test_variables_that_are_no_dict(given: Any) -> None:
    error = refused(PLAIN, [USER], chat_template_kwargs=given)
    assert str(error).startswith("chat_template_kwargs must be a dict of variables for the chat template; it is ")
    assert error.param == "chat_template_kwargs"


@pytest.mark.parametrize("given", [None, "", "parts", 5, []])
def test_a_form_of_content_that_there_is_not(given: Any) -> None:
    error = refused(PLAIN, [USER], content_format=given)
    assert str(error).startswith("chat_template_content_format must be one of ('auto', 'string', 'openai'); it is ")
    assert error.param == "chat_template_content_format"


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_reserved_names(name: str) -> None:
    error = refused(PLAIN, [USER], chat_template_kwargs={name: "x"})
    assert error.param == "chat_template_kwargs"
    assert repr(name) in str(error)


def test_template_errors() -> None:
    error = refused("{{ raise_exception('Roles must alternate!') }}", [USER])
    assert str(error) == "the chat template refused the conversation: Roles must alternate!"
    assert error.param == "messages"
    error = refused("x\n{% if %}", [USER])
    assert "no valid Jinja" in str(error)
    assert "line 2" in str(error)
    assert error.param == "chat_template"
    assert "has no attribute 'x'" in str(refused("{{ messages[0].x.y }}", [USER]))
    assert "TypeError" in str(refused("{{ 'a' + 1 }}", [USER]))
    assert "ZeroDivisionError" in str(refused("{{ 1 / 0 }}", [USER]))
    for broken in ("{% include 'x' %}", "{% extends 'x' %}", "{{ no_such() }}", "{{ 1 | no_such }}", "{% do x %}"):
        refused(broken, [USER])


def test_no_way_out_of_the_sandbox() -> None:
    for escape in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% set x = messages.append(1) %}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ lipsum() }}",
        "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).mro() }}",
    ):
        text = ""
        try:
            text = render(escape, [USER])
        except InvalidRequestError as error:
            text = str(error)
        assert "class '" not in text.replace("__class__", "")
        assert "function" not in text


def test_continue_final_message() -> None:
    talk = [USER, {"role": "assistant", "content": "The answer is"}]
    assert render(PLAIN, talk, continue_final_message=True) == "[user]Hi</s>[assistant]The answer is"
    trims = PLAIN.replace("m.content", "m.content | trim")
    padded = [USER, {"role": "assistant", "content": "  The answer is  "}]
    assert render(trims, padded, continue_final_message=True) == "[user]Hi</s>[assistant]The answer is"
    assert render(PLAIN, padded, continue_final_message=True).endswith("]  The answer is  ")
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(PARTS, parts, continue_final_message=True) == "[assistant](a)(b"
    again = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    assert render(PLAIN, again, continue_final_message=True) == "[user]x</s>[assistant]x"


def test_continue_final_message_that_can_not_be() -> None:
    talk = [{"role": "assistant", "content": "abc"}]
    both = refused(PLAIN, talk, continue_final_message=True, add_generation_prompt=True)
    assert both.param == "continue_final_message"
    cuts = "{{ messages[-1].content[:2] }}"
    assert "does not write" in str(refused(cuts, talk, continue_final_message=True))
    assert "writes it" in str(refused("{{ messages }}", talk, continue_final_message=True))
    called = [{"role": "assistant", "tool_calls": [CALL]}]
    assert refused(PLAIN, called, continue_final_message=True).param == "continue_final_message"
