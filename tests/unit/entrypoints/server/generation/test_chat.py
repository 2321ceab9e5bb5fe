"""/v1/chat/completions: the shapes of answers and streams, and what the chat template is given."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
TEXT = "Once upon a time there was a café."


def post(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={"messages": [USER]} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, parsed: Callable[[str], list[Any]], **body: Any) -> list[dict[str, Any]]:
    answer = client.post(PATH, json={"messages": [USER], "stream": True} | body)
    assert answer.status_code == 200, answer.text
    return parsed(answer.text)


def choices_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def prompt_of(server: Any) -> str:
    """The text of the last prompt, special tokens and all."""
    return server.core.tokenizer.decode(server.core.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_an_answer(client: TestClient, openai_errors: Callable[..., list[str]]) -> None:
    answer = post(client, n=2, request_id="mine", logprobs=True, top_logprobs=2)
    assert openai_errors("CreateChatCompletionResponse", answer) == []
    assert (answer["id"], answer["object"], answer["model"]) == ("chatcmpl-mine", "chat.completion", "demo")
    first = answer["choices"][0]
    thoughts = {"reasoning": None, "reasoning_content": None}
    assert first["message"] == {"role": "assistant", "content": TEXT, "refusal": None} | thoughts
    assert (first["index"], first["finish_reason"], first["stop_reason"]) == (0, "stop", None)
    assert (answer["prompt_token_ids"], answer["prompt_logprobs"], first["token_ids"]) == (None, None, None)
    assert post(client)["choices"][0]["logprobs"] is None


def test_a_batch_of_conversations(server: Any, client: TestClient, openai_errors: Callable[..., list[str]]) -> None:
    path, conversations = f"{PATH}/batch", [[USER], [{"role": "user", "content": "Bye"}], [USER]]
    body = {"messages": conversations, "n": 2, "return_token_ids": True, "request_id": "mine"}
    answer = client.post(path, json=body).json()
    assert openai_errors("CreateChatCompletionResponse", answer) == []
    choices, alone = answer["choices"], post(client, n=2)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4, 5]
    assert [choice["message"]["content"] for choice in choices] == [TEXT, alone["choices"][1]["message"]["content"]] * 3
    assert answer["usage"]["completion_tokens"] == 3 * alone["usage"]["completion_tokens"]
    assert (answer["id"], answer["prompt_token_ids"]) == ("chatcmpl-mine", None)
    prompts = [server.core.tokenizer.decode(request.prompt_token_ids) for request in server.core.requests]
    assert ["Bye" in prompt for prompt in prompts] == [False, True, False, False]
    for field, value in {"messages": [], "echo": True, "prompt_logprobs": 0, "top_logprobs": 1}.items():
        refused = client.post(path, json={"messages": conversations, field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_a_stream_of_a_batch(client: TestClient, parsed: Any) -> None:
    body = {"messages": [[USER], [USER]], "stream": True}
    chunks = parsed(client.post(f"{PATH}/batch", json=body).text)
    for index in (0, 1):
        assert "".join(choice["delta"].get("content") or "" for choice in choices_of(chunks, index)) == TEXT


def test_a_stream_adds_up(client: TestClient, parsed: Any, openai_errors: Callable[..., list[str]]) -> None:
    whole = post(client, n=3)
    chunks = stream(client, parsed, n=3, stream_options={"include_usage": True})
    assert [e for chunk in chunks for e in openai_errors("CreateChatCompletionStreamResponse", chunk)] == []
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in range(3):
        pieces = choices_of(chunks, index)
        assert pieces[0]["delta"]["role"] == "assistant"
        assert pieces[0]["delta"]["content"], "the role comes with the first token"
        assert not any("role" in piece["delta"] for piece in pieces[1:])
        content = "".join(piece["delta"]["content"] for piece in pieces)
        assert content == whole["choices"][index]["message"]["content"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]


def test_an_empty_answer(client: TestClient, parsed: Any, server: Any) -> None:
    server.core.texts = [""]
    assert post(client)["choices"][0]["message"]["content"] == ""
    (piece,) = choices_of(stream(client, parsed))
    assert (piece["delta"], piece["finish_reason"]) == ({"role": "assistant", "content": ""}, "stop")


def test_usage(client: TestClient, parsed: Any) -> None:
    assert not any("usage" in chunk for chunk in stream(client, parsed))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(client, parsed, max_tokens=4, stream_options=options)
    assert chunks.pop()["choices"] == []
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == 4


def test_logprobs(client: TestClient, parsed: Any) -> None:
    content = post(client, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith("Once upon")
    for entry in content:
        assert entry["logprob"] == -0.7
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.6, -0.7, -1.0]
        assert entry["top_logprobs"][1]["token"] == entry["token"]
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
    assert any(entry["token"] == "\ufffd" for entry in content), "é is two tokens, neither of which is text"
    assert "é" in bytes(byte for entry in content for byte in entry["bytes"]).decode()
    pieces = choices_of(stream(client, parsed, logprobs=True, top_logprobs=3))
    assert [entry for piece in pieces for entry in piece["logprobs"]["content"]] == content
    bare = post(client, logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] and entry["token"].startswith("token_id:") for entry in bare)


def test_only_the_likeliest_are_listed(client: TestClient) -> None:
    """The token itself is not the likeliest here."""
    (entry,) = post(client, logprobs=True, top_logprobs=1, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.6]


def test_the_whole_vocabulary_is_listed(make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server({"max_logprobs": -1})
    token = server.core._token
    monkeypatch.setattr(server.core, "_token", lambda r, *args: token(with_logprobs(r, 50), *args))
    with TestClient(server.app) as client:
        (entry,) = post(client, logprobs=True, top_logprobs=-1, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == 50


def with_logprobs(request: Any, num_top: int) -> Any:
    """The core's request as if it asked for so many."""
    params = msgspec.structs.replace(request.task.params, logprobs=num_top)
    return msgspec.structs.replace(request, task=msgspec.structs.replace(request.task, params=params))


def test_token_ids_and_prompt_logprobs(client: TestClient, parsed: Any, server: Any) -> None:
    answer = post(client, return_token_ids=True, prompt_logprobs=0, max_tokens=3)
    assert answer["prompt_token_ids"] == server.request.prompt_token_ids
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert answer["prompt_logprobs"][0] is None
    chunks = stream(client, parsed, return_token_ids=True, max_tokens=3)
    assert [i for piece in choices_of(chunks) for i in piece["token_ids"]] == answer["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


@pytest.mark.parametrize(("ending", "status"), [("abort", 503), ("error", 500)])
def test_failures(client: TestClient, server: Any, parsed: Any, ending: str, status: int) -> None:
    server.core.ending = ending
    assert client.post(PATH, json={"messages": [USER]}).status_code == status
    *chunks, last = stream(client, parsed)
    assert chunks
    assert last["error"]["type"] == "server_error"


# --- the prompt


def test_the_template_writes_the_prompt(client: TestClient, server: Any) -> None:
    parts = [{"type": "text", "text": "Go"}, {"type": "text", "text": "on"}]
    system, assistant = {"role": "system", "content": "Be brief"}, {"role": "assistant", "content": "Yes?"}
    post(client, messages=[system, USER, assistant, {"role": "user", "content": parts}])
    prompt = prompt_of(server)
    places = [prompt.index(text) for text in ("<|system|>", "Be brief", "<|user|>", "Hi", "Yes?", "Go\non")]
    assert places == sorted(places)
    assert prompt.rstrip().endswith("<|assistant|>")
    assert server.core.requests[-1].task.max_tokens == 128 - len(server.core.requests[-1].prompt_token_ids)


def test_generation_prompt(client: TestClient, server: Any) -> None:
    answer = post(client, add_generation_prompt=False)
    assert "<|assistant|>" not in prompt_of(server)
    assert answer["choices"][0]["message"]["role"] == "user", "the user's turn goes on"


def test_continuing_the_last_message(client: TestClient, server: Any, parsed: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "Well,"}]
    answer = post(client, messages=messages, continue_final_message=True)
    assert prompt_of(server).endswith("Well,")
    assert answer["choices"][0]["message"]["content"] == TEXT
    echoed = post(client, messages=messages, continue_final_message=True, echo=True)
    assert echoed["choices"][0]["message"]["content"] == "Well," + TEXT
    pieces = choices_of(stream(client, parsed, messages=messages, continue_final_message=True, echo=True))
    assert "".join(piece["delta"]["content"] for piece in pieces) == "Well," + TEXT
    assert post(client, echo=True)["choices"][0]["message"]["content"] == TEXT, "nothing of the user's is echoed"


def test_roles(make_server: Callable[..., Any], client: TestClient, server: Any) -> None:
    post(client, messages=[{"role": "developer", "content": "Be brief"}, USER])
    assert "<|system|>" in prompt_of(server), "a template without developers gets a system's message"
    knows = make_server(chat_template="{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{# developer #}")
    with TestClient(knows.app) as other:
        post(other, messages=[{"role": "developer", "content": "Be brief"}, USER])
    assert prompt_of(knows) == "developer:Be brief;user:Hi;"
    with TestClient(make_server(response_role="bot").app) as other:
        assert post(other)["choices"][0]["message"]["role"] == "bot"


def test_any_role_reaches_the_template(make_server: Callable[..., Any]) -> None:
    server = make_server(chat_template="{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    with TestClient(server.app) as client:
        post(client, messages=[USER, {"role": "ipython", "content": "4"}])
    assert prompt_of(server) == "user:Hi;ipython:4;"


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %} {{ c.function.name }}"
    "({{ c.function.arguments.x }}){% endfor %}:{{ m.content or '' }};{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }},{% endfor %}"
    "{% for d in documents or [] %}{{ d.text }},{% endfor %}"
    "{{ colour }}{{ reasoning_effort }}{{ verbosity }}"
)


def test_what_a_template_is_given(make_server: Callable[..., Any]) -> None:
    server = make_server(chat_template=TEMPLATE)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "done"})
    given = {
        "tools": [{"type": "function", "function": {"name": "g"}}],
        "tool_choice": "none",
        "documents": [{"text": "doc"}],
        "chat_template_kwargs": {"colour": "red"},
        "reasoning_effort": "high",
        "verbosity": "low",
    }
    with TestClient(server.app) as client:
        post(client, messages=messages, **given)
    assert prompt_of(server) == "user:Hi;assistant f(5):;tool:done;g,doc,redhighlow"


def test_templates_of_requests(make_server: Callable[..., Any]) -> None:
    server = make_server(trust_request_chat_template=True)
    with TestClient(server.app) as client:
        post(client, chat_template="<{{ messages[0].content }}>")
        assert prompt_of(server) == "<Hi>"
        for template in ("{{", "{{ raise_exception('no') }}", "{% for i in range(10**9) %}{% endfor %}"):
            answer = client.post(PATH, json={"messages": [USER], "chat_template": template})
            assert answer.status_code == 400, template


def test_a_templates_own_error(make_server: Callable[..., Any]) -> None:
    with TestClient(make_server(chat_template="{{ raise_exception('roles must alternate') }}").app) as client:
        error = client.post(PATH, json={"messages": [USER]}).json()["error"]
    assert error["param"] == "messages"
    assert "roles must alternate" in error["message"]


def test_without_a_tokenizer(make_server: Callable[..., Any]) -> None:
    with TestClient(make_server({"skip_tokenizer_init": True}).app) as client:
        answer = client.post(PATH, json={"messages": [USER]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
