"""Tools and thoughts over HTTP: what is asked for reaches template and engine, what the model writes comes as calls."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quire.entrypoints.server import parsing
from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.parsers.base import Function, Offer, ToolCallDelta, ToolCallStart
from quire.entrypoints.server.parsers.generic import learned_form
from quire.entrypoints.server.parsers.reader import ScriptParser
from quire.entrypoints.server.parsers.registry import (
    THOUGHT_NAMES,
    TOOL_FORMS,
    TOOL_NAMES,
    check_name,
    thought_format,
    tool_format,
)
from quire.entrypoints.server.parsing import plan_parsing, warm_up
from quire.errors import ConfigError
from quire.protocol.requests import SamplingTask
from quire.sampling_params import SamplingParams
from quire.text.template import ChatTemplate

TEMPLATE = """{% for t in tools or [] %}{{ t.function.name }} {% endfor %}
{%- for m in messages %}{{ m.role }}: {{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
OTHER = """{% for m in messages %}{{ m.role }}: {{ m.content or '' }}
{%- for c in m.tool_calls or [] %}@@call {{ c.function.name }} with {{ c.function.arguments | tojson }}@@{% endfor %}
{% endfor %}"""
SHARED = Path(__file__).parents[6] / "shared" / "data" / "chat_templates"
USER = {"role": "user", "content": "Hi"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
    for name in ("add", "sub")
]
LARGE = {"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 2**20}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 3}}\n</tool_call>'


@pytest.fixture
def server(make_server: Callable[..., Any]) -> Any:
    made = make_server(chat_template=TEMPLATE, reasoning_parser="qwen3")
    made.core.texts = [f"<think>\nSo.\n</think>\n\nI add.\n{CALL}\n{CALL}"]
    return made


@pytest.fixture
def client(server: Any) -> Iterator[TestClient]:
    with TestClient(server.app) as client:
        yield client


def post(client: TestClient, **fields: Any) -> Any:
    answer = client.post("/v1/chat/completions", json={"messages": [USER], "tools": TOOLS} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json() if not fields.get("stream") else answer.text


def refusal(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": [USER], "tools": TOOLS} | fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def params_of(server: Any) -> SamplingParams:
    task = server.request.task
    assert isinstance(task, SamplingTask)
    return task.params


def test_calls_and_thoughts(client: TestClient, openai_errors: Callable[..., list[str]]) -> None:
    answer = post(client)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert openai_errors("CreateChatCompletionResponse", answer) == []
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("I add.", "So.", "So.")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"x": 3}'}] * 2
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", ["<think>\nSo.\n</think>", "<think>\nSo."], ids=["whole", "cut"])
@pytest.mark.parametrize("shown", [True, False])
def test_thoughts_alone(client: TestClient, server: Any, text: str, shown: bool) -> None:
    """There is no content then, as in streams, rather than an empty one."""
    server.core.texts = [text]
    message = post(client, include_reasoning=shown)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "So." if shown else None)
    echoed = post(
        client,
        include_reasoning=shown,
        echo=True,
        messages=[USER, {"role": "assistant", "content": "A"}],
        continue_final_message=True,
    )
    assert echoed["choices"][0]["message"]["content"] == "A"


def test_a_stream_of_them_adds_up(
    client: TestClient, parsed: Callable[..., list[Any]], openai_errors: Callable[..., list[str]]
) -> None:
    events = parsed(post(client, stream=True))
    assert not any(openai_errors("CreateChatCompletionStreamResponse", event) for event in events)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "So."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
    calls: dict[int, dict[str, str]] = {}
    for piece in [piece for delta in deltas for piece in delta.get("tool_calls", [])]:
        call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
        call["id"] += piece.get("id", "")
        for name, value in piece["function"].items():
            call[name] += value
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [("add", '{"x": 3}')] * 2
    assert deltas[0]["role"] == "assistant"
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "tool_calls"
    assert len(deltas) > 8, "they come as they are written"


def test_history_reaches_the_template(client: TestClient, server: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    post(client, messages=messages, tool_choice="none", chat_template_kwargs={"enable_thinking": False})
    prompt = server.llm.tokenizer.decode(server.request.prompt_token_ids, skip_special_tokens=False)
    written = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    assert prompt == f"add sub user: Hiassistant: {written}tool: 2<think></think>"


def test_without_choice_calls_are_text(client: TestClient, server: Any) -> None:
    server.core.texts = [CALL]
    message = post(client, tool_choice="none")["choices"][0]["message"]
    assert message["content"] == CALL
    assert "tool_calls" not in message


def test_effort_switches_thinking(client: TestClient, server: Any) -> None:
    post(client, reasoning_effort="none")
    prompt = server.llm.tokenizer.decode(server.request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<think></think>")


def test_tools_that_are_free_cost_no_grammar(client: TestClient, server: Any) -> None:
    post(client)
    assert params_of(server).structured_outputs is None


def grammar(server: Any, **fields: Any) -> str | None:
    """What the engine is asked to hold an answer to."""
    from quire.entrypoints.server.tool_request import read_offer

    offer = read_offer(fields.get("tools", TOOLS), fields.get("tool_choice"), fields.get("parallel"))
    params = SamplingParams(structured_outputs=fields.get("content"))
    body = ChatCompletionRequest.model_construct(thinking_token_budget=fields.get("budget"))
    planned = plan_parsing(server.state, "", params, offer, body).params.structured_outputs
    return None if planned is None else planned.grammar


def test_what_is_held_by_a_grammar(server: Any) -> None:
    named = grammar(server, tool_choice={"type": "function", "function": {"name": "sub"}})
    assert named is not None
    assert ('"sub"' in named.replace("\\", ""), '"add"' in named.replace("\\", "")) == (True, False)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[1]]}}
    assert '"sub' in (grammar(server, tool_choice=allowed) or "").replace("\\", "")
    assert ")*" in (grammar(server, tool_choice="required") or "")
    assert ")*" not in (grammar(server, tool_choice="required", parallel=False) or ")*")
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    assert grammar(server, tools=[strict]) is not None
    assert grammar(server) is None
    assert grammar(server, tool_choice="none") is None


def test_a_call_has_the_arguments_that_its_function_names(server: Any) -> None:
    """As vLLM's grammars have it: others would be made up, and no function takes them."""

    def held(**parameters: Any) -> str:
        function = {"name": "f", **({"parameters": parameters["schema"]} if parameters else {})}
        return grammar(server, tools=[{"type": "function", "function": function}], tool_choice="required") or ""

    closed, named = '"additionalProperties": false', {"x": {"type": "integer"}}
    assert closed in held()
    assert closed in held(schema={"type": "object", "properties": {}})
    assert closed in held(schema={"properties": named, "required": ["x"]})
    for more in ({"additionalProperties": {"type": "string"}}, {"required": ["y"]}, {"anyOf": [{"required": ["x"]}]}):
        assert closed not in held(schema={"properties": named, **more})
    assert closed not in held(schema={"type": "object"})


def test_refused_by_name(client: TestClient) -> None:
    for fields, param in [
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),  # to the demo's tokenizer its tags are text
        ({"tool_choice": "required", "structured_outputs": {"grammar": 'start: "a"'}}, "tools"),
        ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs"),
        ({"tool_choice": "required", "tools": [LARGE]}, "tools"),
    ]:
        assert refusal(client, **fields)["param"] == param, fields


def test_a_schema_after_thoughts_is_refused_as_without_them(client: TestClient) -> None:
    for tools in (None, TOOLS):
        error = refusal(client, tools=tools, guided_json="{x")
        assert error["param"] == "guided_json"
        assert error["message"].startswith("guided_json can't be used: it is no JSON: Expecting property name")
    deep = '{"enum": ' + "[" * 200_000 + "]" * 200_000 + "}"
    assert refusal(client, guided_json=deep)["param"] == "guided_json"


@pytest.mark.parametrize("key", ["not", "uniqueItems", "divisibleBy", "extends", "disallow"])
def test_what_no_grammar_holds_is_refused_with_its_place(client: TestClient, key: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "array", key: {}}}}
    tools: list[Any] = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": schema}}]
    error = refusal(client, tools=tools, tool_choice="required")
    assert error["param"] == "tools"
    assert error["message"].startswith("tools[1]: the parameters of 'f' can't be held by a grammar: ")
    assert f"{key!r} at #/properties/x;" in error["message"]
    post(client, tools=tools)  # which is not held
    format = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    error = refusal(client, tools=None, response_format=format)
    assert error["param"] == "response_format"
    assert error["message"].startswith("response_format can't be used: the JSON schema has keywords")
    assert f"{key!r} at #/properties/x;" in error["message"]


def test_a_schema_without_end_is_refused(make_server: Callable[..., Any]) -> None:
    to_itself = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
    optional = {"type": "object", "properties": {"x": {"$ref": "#"}}}  # where values stand alone, "#" is x itself
    for form, schema in [("hermes", to_itself), ("qwen3_coder", to_itself), ("qwen3_coder", optional)]:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        with TestClient(make_server(chat_template=TEMPLATE, tool_call_parser=form).app) as client:
            error = refusal(client, tools=[tool], tool_choice="required")
        assert error["message"].startswith("tools[0]: the parameters of 'f' ")
        assert "without an end" in error["message"]


def test_a_format_is_learned_from_the_template(make_server: Callable[..., Any]) -> None:
    server = make_server(chat_template=OTHER)
    server.core.texts = ['Well. @@call sub with {"x": 5}@@']
    with TestClient(server.app) as client:
        message = post(client)["choices"][0]["message"]
    assert message["content"] == "Well."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "sub", "arguments": '{"x": 5}'}]
    assert grammar(server, tool_choice="required") is not None


def test_of_templates_that_clients_send_few_formats_are_kept(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsing, "_MOST_LEARNED", 2)
    server = make_server(chat_template=OTHER, trust_request_chat_template=True)
    server.core.texts = ['Well. @@call sub with {"x": 5}@@'] * 3
    with TestClient(server.app) as client:
        for mark in ("a", "b", "c"):
            assert post(client, chat_template=OTHER + mark)["choices"][0]["message"]["tool_calls"]
    assert list(server.state.learned_forms) == [OTHER + "b", OTHER + "c"]


def test_a_template_that_a_client_sends_is_learned_beside_the_event_loop(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take its time, and starts a process."""
    learned, threads = parsing._learned, list[str]()
    monkeypatch.setattr(
        parsing, "_learned", lambda *args: threads.append(threading.current_thread().name) or learned(*args)
    )
    server = make_server(chat_template=OTHER, trust_request_chat_template=True)
    server.core.texts = ['Well. @@call sub with {"x": 5}@@'] * 2
    with TestClient(server.app) as client:
        for _ in range(2):
            assert post(client, chat_template=OTHER + "a")["choices"][0]["message"]["tool_calls"]
    assert [name.partition("_")[0] for name in threads] == ["asyncio"]


def test_the_format_is_known_before_the_first_request(make_server: Callable[..., Any]) -> None:
    server = make_server(chat_template=OTHER)
    asyncio.run(warm_up(server.state))
    assert list(server.state.learned_forms) == [OTHER]


def test_without_a_format_a_call_is_json(make_server: Callable[..., Any]) -> None:
    server = make_server()
    assert grammar(server, tool_choice="required") is not None
    with TestClient(server.app) as client:
        assert refusal(client)["param"] == "tools"
    choice = {"type": "function", "function": {"name": "add"}}
    assert '"name"' not in (grammar(server, tool_choice=choice) or '"name"')


def test_options(make_server: Callable[..., Any]) -> None:
    with TestClient(make_server(chat_template=TEMPLATE, enable_auto_tool_choice=False).app) as client:
        assert "enable-auto-tool-choice" in refusal(client)["message"]
    with TestClient(make_server(chat_template=TEMPLATE, tool_call_parser="none").app) as client:
        assert refusal(client)["param"] == "tools"
    check_name("tool_call_parser", "hermes", TOOL_NAMES)
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        check_name("tool_call_parser", "hermez", TOOL_NAMES)
    with pytest.raises(ConfigError, match="Did you mean 'deepseek_r1'"):
        check_name("reasoning_parser", "deepseek-r1", THOUGHT_NAMES)


FORMATS = {
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen3-Coder": ("qwen3_coder", None),
    "GLM-4.6": ("glm45", "think"),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "google-gemma-4-31B-it": ("gemma", "gemma4"),
    "fireworks-ai-llama-3-firefunction-v2": ("phi4_mini_json", None),
    "meetkai-functionary-medium-v3.1": (None, None),
    "google-gemma-2-2b-it": (None, None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
}


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
@pytest.mark.parametrize("name", FORMATS)
def test_a_template_tells_its_formats(name: str) -> None:
    template = (SHARED / f"{name}.jinja").read_text()
    assert (tool_format("auto", template), thought_format("auto", template)) == FORMATS[name]
    assert thought_format(None, template) == ("openai_gptoss" if "gpt-oss" in name else None)


def test_arguments_reach_templates_that_want_text(make_server: Callable[..., Any]) -> None:
    loops = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    text = loops + "{{ 'call ' + c.function.arguments }}{% endfor %}{% endfor %}"
    server = make_server(chat_template=text)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    with TestClient(server.app) as client:
        post(client, tools=None, messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert json.loads(server.llm.tokenizer.decode(server.request.prompt_token_ids)[5:]) == {"x": 1}


WRITTEN = [
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "GLM-4.6",
    "moonshotai-Kimi-K2",
    "deepseek-ai-DeepSeek-V3.1",
    "openai-gpt-oss-120b",
    "ibm-granite-granite-4.0",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "unsloth-mistral-Devstral-Small-2507",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "meta-llama-Llama-3.1-8B-Instruct",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    # Formats that are learned.
    "Apriel-1.6-15b-Thinker-fixed",
    "unsloth-Apriel-1.5",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "meetkai-functionary-medium-v3.1",
]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_template_writes_of_a_call_is_read_as_one(name: str) -> None:
    text = (SHARED / f"{name}.jinja").read_text()
    template = ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"})

    def render(messages: list[dict[str, Any]], tools: list[Any], opens: bool) -> str:
        return template.render(messages, tools=tools, add_generation_prompt=opens)

    format = tool_format("auto", text)
    form = TOOL_FORMS[format] if format else learned_form(render)
    assert form is not None
    parameters = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "rain", "description": "Rain?", "parameters": parameters}}
    arguments = {"place": 'Å "b"', "days": 3}
    call = {"id": "abc012345", "type": "function", "function": {"name": "rain", "arguments": json.dumps(arguments)}}
    opened = render([USER], [tool], True)
    written = render([USER, {"role": "assistant", "content": "", "tool_calls": [call]}], [tool], False)
    begun = next(at for at in range(len(written)) if not opened.startswith(written[: at + 1]))
    parser = ScriptParser(form.script, Offer((Function("rain", parameters),)), lambda: "call")
    events = parser.push(written[begun:].removesuffix("</s>")) + parser.finish()
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["rain"]
    pieces = [event.arguments for event in events if isinstance(event, ToolCallDelta)]
    assert json.loads("".join(pieces)) == arguments
