"""What an operator says of all requests: chat templates' variables and content, tools, structures, middleware."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.responses import PlainTextResponse

from quire.config.engine_args import EngineArgs
from quire.entrypoints.server.app import imported
from quire.entrypoints.server.launch import serve
from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError

SHOWS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}|{{ mood }}|{{ reasoning_effort }}|{{ (tools or []) | length }}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def prompt_of(make_server: Callable[..., Any]) -> Callable[..., str]:
    """The prompt that a server with some options makes of a chat request."""

    def get(options: dict[str, Any], **body: Any) -> str:
        server = make_server(**{"chat_template": SHOWS} | options)
        with TestClient(server.app) as client:
            message = {"role": "user", "content": body.pop("content", "Hi")}
            answer = client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 2} | body)
        assert answer.status_code == 200, answer.text
        return server.core.tokenizer.decode(server.request.prompt_token_ids, skip_special_tokens=False)

    return get


def test_default_variables(prompt_of: Callable[..., str]) -> None:
    options = {"default_chat_template_kwargs": {"mood": "gay"}}
    assert prompt_of({}) == "Hi|||0"
    assert prompt_of(options) == "Hi|gay||0"
    assert prompt_of(options, chat_template_kwargs={"mood": "sad"}) == "Hi|sad||0"


def test_default_variables_that_are_the_requests_own() -> None:
    with pytest.raises(ConfigError, match="default_chat_template_kwargs can't set 'tools'; each request says it"):
        serve(ServerArgs(default_chat_template_kwargs={"tools": []}), EngineArgs())


def test_efforts(prompt_of: Callable[..., str]) -> None:
    options = {"reasoning_effort_map": {"medium": "low", "xhigh": "max"}}
    assert prompt_of(options, reasoning_effort="medium") == "Hi||low|0"
    assert prompt_of(options, reasoning_effort="high") == "Hi||high|0"
    assert prompt_of({}, reasoning_effort="medium") == "Hi||medium|0"


def test_tools_that_may_not_be_called(prompt_of: Callable[..., str]) -> None:
    asked = {"tools": [TOOL], "tool_choice": "none"}
    assert prompt_of({}, **asked) == "Hi|||1"
    assert prompt_of({"exclude_tools_when_tool_choice_none": True}, **asked) == "Hi|||0"


@pytest.mark.parametrize(
    ("option", "plain", "parts"),
    [("auto", "Hi", "A\nB"), ("string", "Hi", "A\nB"), ("openai", "text=Hi;", "text=A;text=B;")],
)
def test_forms_of_content(prompt_of: Callable[..., str], option: str, plain: str, parts: str) -> None:
    """A template whose loop is behind a condition, which no trial sees through, gets parts where it is said."""
    looks = "{% for p in m.content %}{{ p.type }}={{ p.text }};{% endfor %}"
    loop = "{% for m in messages %}{% if m.content is string or m.content[0].text == 'x' %}{{ m.content }}{% else %}"
    options = {"chat_template": loop + looks + "{% endif %}{% endfor %}", "chat_template_content_format": option}
    assert prompt_of(options) == plain
    assert prompt_of(options, content=[{"type": "text", "text": text} for text in "AB"]) == parts


def test_content_that_a_template_would_go_through(prompt_of: Callable[..., str]) -> None:
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.text or p }}]{% endfor %}{% endfor %}"
    content = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert prompt_of({"chat_template": template}, content=content) == "[A][B]"
    form = {"chat_template": template, "chat_template_content_format": "string"}
    assert prompt_of(form, content=content) == "[A][\n][B]"


def test_structures(make_server: Callable[..., Any]) -> None:
    for options, expected in (({}, False), ({"disable_any_whitespace": True}, True)):
        server = make_server(structured_outputs_config=options)
        seen: list[Any] = []
        run = server.llm.open

        def noted(prompt: Any, *args: Any, seen: Any = seen, run: Any = run) -> Any:
            seen.append(prompt.params.structured_outputs)
            return run(prompt, *args)

        server.llm.open = noted
        with TestClient(server.app) as client:
            for path, body in (
                ("completions", {"prompt": "Hi"}),
                ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ):
                client.post(f"/v1/{path}", json=body | {"max_tokens": 2, "response_format": {"type": "json_object"}})
            client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
        assert [found and found.disable_any_whitespace for found in seen] == [expected, expected, None]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "mine"}, "structured_outputs_config: backend must be one of 'auto', 'xgrammar'"),
        (
            {"disable_any_whitespce": True},
            "has no option 'disable_any_whitespce'. Did you mean 'disable_any_whitespace'?",
        ),
        ({"reasoning_parser": "qwen3"}, "structured_outputs_config has no option 'reasoning_parser'."),
    ],
)
def test_structures_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ServerArgs(structured_outputs_config=given)
    assert message in str(refusal.value)


# ---- middleware


class Stamp:
    """Middleware of ASGI, as an operator writes it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"1")]
            await send(message)

        await self.app(scope, receive, stamped)


async def refuse(request: Any, call_next: Any) -> Any:
    """A function likewise."""
    return PlainTextResponse("no", 418) if request.headers.get("x-bad") else await call_next(request)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their module."""
    module = types.ModuleType("operators")
    module.__dict__.update(Stamp=Stamp, refuse=refuse, number=3)
    monkeypatch.setitem(sys.modules, "operators", module)


@pytest.mark.usefixtures("operators")
def test_middleware(make_server: Callable[..., Any]) -> None:
    server = make_server(middleware=["operators.refuse", "operators.Stamp"], api_key=["k"])
    with TestClient(server.app) as client:
        ok, bad = client.get("/health"), client.get("/health", headers={"x-bad": "1"})
        assert (ok.status_code, ok.headers["x-stamp"]) == (200, "1")
        assert (bad.status_code, bad.text, bad.headers["x-stamp"]) == (418, "no", "1"), "the last one is outermost"
        assert client.get("/v1/models", headers={"x-bad": "1"}).status_code == 418, "around the check of keys"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "operators.none",
            "middleware 'operators.none' can't be imported: module 'operators' has no attribute 'none'.",
        ),
        ("no_such_module.x", "middleware 'no_such_module.x' can't be imported: No module named 'no_such_module'."),
        ("word", "middleware 'word' can't be imported: Empty module name."),
        ("operators.number", "middleware 'operators.number' is a int, neither a class nor an async function."),
    ],
)
@pytest.mark.usefixtures("operators")
def test_middleware_that_is_none(path: str, message: str) -> None:
    for call in (lambda: imported(path), lambda: serve(ServerArgs(middleware=[path]), EngineArgs())):
        with pytest.raises(ConfigError) as refusal:
            call()
        assert str(refusal.value) == message
