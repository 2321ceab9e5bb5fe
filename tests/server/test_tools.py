"""Tools, thoughts and an agent against a real server: a grammar has the bundled model write what it never learned."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import RunningServer

ROOT = Path(__file__).parents[2]
USER: list[Any] = [{"role": "user", "content": "What is 6 times 7?"}]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
PLACE = {"type": "string", "enum": ["Oslo", "Å"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }
    for name, properties in {"add": {"a": NUMBER, "b": NUMBER}, "weather": {"place": PLACE}}.items()
]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
# The template opens a thought, after which calls are written as Hermes does.
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}<think>"
FLAGS = ["--chat-template", TEMPLATE, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]

pytestmark = pytest.mark.slow


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    before = server.golden()
    with client_of(server) as client:
        yield client
    assert server.golden() == before


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, _no_cache_of_the_users: None) -> Iterator[openai.OpenAI]:
    """Of a server of the bundled model, to whose tokenizer the end of a thought is a token."""
    model = tmp_path_factory.mktemp("thinker")
    for file in (ROOT / "quire" / "demo").iterdir():
        if file.suffix == ".json":
            text = file.read_text(encoding="utf-8")
            (model / file.name).write_text(text.replace("<|user|>", "</think>"), encoding="utf-8")
        elif file.is_file():
            (model / file.name).symlink_to(file)
    server = RunningServer(model / "log", *FLAGS, "--served-model-name", "demo", model=str(model))
    try:
        with client_of(server) as client:
            yield client
        server.stop()
    finally:
        server.kill()


def check(calls: Any) -> None:
    """The calls are of tools that there are, with arguments that obey the schemas."""
    jsonschema = pytest.importorskip("jsonschema")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def streamed(client: openai.OpenAI, **fields: Any) -> Any:
    with client.chat.completions.stream(model="demo", messages=USER, **fields) as stream:
        return stream.get_final_completion().choices[0]


@pytest.mark.parametrize("who", ["client", "thinker"])
@pytest.mark.parametrize("choice", ["required", WEATHER], ids=["required", "named"])
def test_calls_whole_and_streamed(who: str, choice: Any, request: pytest.FixtureRequest) -> None:
    client: openai.OpenAI = request.getfixturevalue(who)
    budget = {"thinking_token_budget": 6} if who == "thinker" else {}
    for seed in range(2):
        fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "max_tokens": 90}
        fields |= {"temperature": 1.5, "parallel_tool_calls": False, "extra_body": budget}
        whole = client.chat.completions.create(model="demo", messages=USER, **fields).choices[0]
        check(whole.message.tool_calls)
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        if choice is WEATHER:
            assert [call.function.name for call in whole.message.tool_calls or ()] == ["weather"]  # type: ignore[union-attr]
        other = streamed(client, **fields)
        assert [c.function.arguments for c in other.message.tool_calls] == [
            c.function.arguments  # type: ignore[union-attr]
            for c in whole.message.tool_calls or ()
        ]
        assert other.finish_reason == "tool_calls"


def test_several_at_once(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "temperature": 2, "max_tokens": 120, "n": 4}
    answer = client.chat.completions.create(model="demo", messages=USER, seed=3, **fields)
    for choice in answer.choices:
        if choice.finish_reason == "tool_calls":
            check(choice.message.tool_calls)


def test_a_thought_ends_with_its_budget(thinker: openai.OpenAI) -> None:
    answer = thinker.chat.completions.create(
        model="demo", messages=USER, max_tokens=30, extra_body={"thinking_token_budget": 5}
    )
    message: Any = answer.choices[0].message
    assert message.reasoning_content
    assert len(message.reasoning_content.split()) <= 5
    assert message.content


def test_a_schema_holds_after_the_thought(thinker: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"place": PLACE}, "required": ["place"], "additionalProperties": False}
    answer = thinker.chat.completions.create(
        model="demo",
        messages=USER,
        max_tokens=200,  # white space may come between all parts
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
        extra_body={"thinking_token_budget": 5},
    )
    assert json.loads(answer.choices[0].message.content or "")["place"] in PLACE["enum"]


def test_a_schema_or_a_call(thinker: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"place": PLACE}, "required": ["place"], "additionalProperties": False}
    answer = thinker.chat.completions.create(
        model="demo",
        messages=USER,
        max_tokens=90,
        tools=TOOLS,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
        extra_body={"thinking_token_budget": 5},
    )
    message = answer.choices[0].message
    if message.tool_calls:
        check(message.tool_calls)
    else:
        assert json.loads(message.content or "")["place"] in PLACE["enum"]


def test_the_agent(client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("agent", ROOT / "examples" / "agent.py")
    assert spec is not None
    assert spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    results = agent.run_agent(client, "What is 6 times 7, plus 8?")
    assert len(results) == agent.NUM_ROUNDS
    assert results == agent.run_agent(client, "What is 6 times 7, plus 8?")
    assert "answer: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]], "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {
                                "type": "object",
                                "properties": {"a": {"type": "integer", "multipleOf": "x"}},
                            },
                        },
                    }
                ],
            },
            "tools",
        ),
        ({"tool_choice": "auto"}, "tools"),
    ],
)
def test_refused_by_name(client: openai.OpenAI, server: RunningServer, fields: dict[str, Any], param: str) -> None:
    golden = server.golden()
    asked: Any = {"tools": TOOLS} | fields
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="demo", messages=USER, max_tokens=20, **asked)
    assert error.value.param == param
    assert server.golden() == golden


def test_an_unknown_parser_is_refused_with_the_nearest(start_server: Callable[..., RunningServer]) -> None:
    with pytest.raises(AssertionError, match="Did you mean 'hermes'"):
        start_server("--tool-call-parser", "hermez")
