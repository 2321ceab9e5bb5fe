"""Chat templates render as transformers renders them, and fail where it fails.

Over small templates of our own, and (slow) the 69 real ones, with several kinds of conversation each.
"""

import copy
import datetime
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as theirs_module
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quire.errors import InvalidRequestError
from quire.text import sandbox as template_sandbox
from quire.text.template import ChatTemplate, iterates_content

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
REAL = sorted(path.name for path in SHARED.glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & later, für é",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "n": 1}},
}
SYSTEM = {"role": "system", "content": "Be brief. 日本 <b>"}
NO_PROMPT = {"add_generation_prompt": False}
CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool(content: str, call_id: str = "abcdefghi") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": "get_weather", "content": content}


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "single": ([user("Hi there")], {}),
    "spaces": ([user("  Hi \n there \n")], {}),
    "turns": ([user("a"), assistant("b"), user("c"), assistant("d"), user("e")], {}),
    "no_generation_prompt": ([user("a"), assistant("b")], NO_PROMPT),
    "system": ([SYSTEM, user("a"), assistant("b"), user("c")], {}),
    "system_alone": ([SYSTEM], {}),
    "tools": ([SYSTEM, user("weather?")], {"tools": [TOOL]}),
    "tool_call": (
        [user("weather?"), assistant(None, tool_calls=[CALL]), tool('{"t": 20}'), user("thanks")],
        {"tools": [TOOL]},
    ),
    "tool_calls": (
        [user("weather?"), assistant("let me see", tool_calls=[CALL, CALL | {"id": "bbbbbbbbb"}])]
        + [tool("20"), tool("21", "bbbbbbbbb")],
        {"tools": [TOOL]},
    ),
    "continue": ([user("a"), assistant("The answer is")], CONTINUE),
    "continue_with_spaces": ([user("a"), assistant("  The answer is  ")], CONTINUE),
    "continue_thought": ([user("a"), assistant("<think>hm</think>The")], CONTINUE),
    "continue_user": ([user("a")], CONTINUE),
    "reasoning": ([user("a"), assistant("b", reasoning_content="because"), user("c")], {}),
    "unknown_role": ([{"role": "wizard", "content": "x"}], {}),
    "two_users": ([user("a"), user("b")], {}),
    "variables": ([user("a")], {"enable_thinking": False, "thinking": True, "reasoning_effort": "high"}),
    "documents": ([user("a")], {"documents": [{"title": "T", "text": "X"}]}),
}
OWN = {
    "chatml": "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}",
    "strict": "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ documents }}{{ strftime_now('%d %b %Y') }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, l=[]) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% set ns.l = ns.l + [m.role ~ '-' ~ loop.index] %}{% endfor %}{{ ns.n }}{{ ns.l | join(', ') }}{{ ns.l }}content",
    "macro": "{%- macro show(m, i=0) -%}{{ '%03d' % i }} {{ '{:>9}'.format(m.role) }}: {{ caller() if caller }}"
    "{{ m.content | indent(4) }}{%- endmacro -%}\n"
    "{% for m in messages %}\n    {{- show(m, loop.index) }}\n{% endfor %}\n",
}


class _FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "_FixedDate":
        return cls(2024, 7, 26, 12, 0, 0)


@pytest.fixture(autouse=True)
def _fixed_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs_module, "datetime", _FixedDate)
    monkeypatch.setattr(template_sandbox, "datetime", _FixedDate)


@cache
def their_tokenizer() -> Any:
    vocabulary = {token: i for i, token in enumerate(SPECIAL.values())}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")), **SPECIAL
    )


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls' arguments as text, which templates get here that fail with objects."""
    found = copy.deepcopy(messages)
    for message in found:
        for call in message.get("tool_calls") or ():
            if not isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return found


def theirs(template: str, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str | None:
    try:
        return their_tokenizer().apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)
    except Exception:  # a template can raise anything
        return None


def theirs_with(
    content: str | None, template: str, messages: list[dict[str, Any]], arguments: dict[str, Any]
) -> str | None:
    """As `theirs`, with a content for the messages without, which apply_chat_template gives no such entry."""
    filled = [message | {"content": message["content"] or content} for message in messages]
    try:
        return theirs_module.render_jinja_template([filled], chat_template=template, **arguments, **SPECIAL)[0][0]
    except Exception:
        return None


def compare(template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    arguments = {"add_generation_prompt": True} | options
    expected = theirs(template, copy.deepcopy(messages), arguments)
    if any(message.get("tool_calls") for message in messages):
        either = messages, with_text_arguments(messages)
        tries = [theirs(template, form, arguments) for form in either]
        tries += [theirs_with(content, template, form, arguments) for content in (None, "") for form in either]
        expected = next((text for text in [expected, *tries] if text is not None), None)
    variables = {
        name: arguments.pop(name) for name in ("enable_thinking", "thinking", "reasoning_effort") if name in arguments
    }
    before = copy.deepcopy(messages)
    try:
        text = ChatTemplate(template, SPECIAL).render(messages, **arguments, chat_template_kwargs=variables)
    except InvalidRequestError:
        text = None
    assert text == expected
    assert messages == before


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", OWN)
def test_own_templates(name: str, conversation: str) -> None:
    compare(OWN[name], *CONVERSATIONS[conversation])


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL or [pytest.param("", marks=pytest.mark.skip("needs ../shared/data"))])
def test_real_templates(name: str) -> None:
    template = (SHARED / name).read_text()
    for messages, options in CONVERSATIONS.values():
        compare(template, messages, options)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL or [pytest.param("", marks=pytest.mark.skip("needs ../shared/data"))])
def test_detection_of_content_parts(name: str) -> None:
    """A template is said to take parts just when transformers renders their text, and no list."""
    template = (SHARED / name).read_text()
    parts = [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]
    try:
        rendered = their_tokenizer().apply_chat_template(parts, chat_template=template, tokenize=False)
    except Exception:
        rendered = ""
    takes_parts = "one" in rendered and "{" not in rendered
    assert iterates_content(template_sandbox.Sandbox().from_string(template)) == takes_parts
    if takes_parts:
        compare(template, parts, {})


def test_tool_call_arguments_as_text() -> None:
    """Arguments come from clients as JSON text, and reach the template as transformers' users give them."""
    messages, options = CONVERSATIONS["tool_call"]
    as_text = copy.deepcopy(messages)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Zürich", "n": 1}'
    template = ChatTemplate(OWN["json"], SPECIAL)
    assert template.render(as_text, **options) == template.render(messages, **options)


def test_all_real_templates_are_there(shared_data: Path) -> None:
    assert len(list((shared_data / "chat_templates").glob("*.jinja"))) == len(REAL) >= 69
