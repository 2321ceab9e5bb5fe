"""/v1/responses: objects, events, what the template is given, what is kept, and refusals by name."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient

from quire.entrypoints.server.dialects import responses
from quire.entrypoints.server.dialects.responses_input import messages_of, read_items
from quire.entrypoints.server.response_store import open_store
from quire.errors import OverloadedError

PATH = "/v1/responses"
TEXT = "Once upon a time there was a café."
USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"where": "box"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "A cat."}


def post(client: TestClient, path: str = PATH, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body if path != PATH else {"input": "Hi"} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def get(client: TestClient, path: str, **query: Any) -> dict[str, Any]:
    answer = client.get(f"{PATH}/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def schema_of(event: dict[str, Any]) -> str:
    """The published name of an event's schema."""
    words = event["type"].replace("output_text", "text").replace(".", "_").split("_")
    return "".join(word.capitalize() for word in words) + "Event"


def events_in(text: str) -> list[dict[str, Any]]:
    """The events of a stream; their names are their types, and they are numbered from the first one on."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    first = events[0]["sequence_number"]
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    return events


def stream(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(PATH, json={"input": "Hi", "stream": True} | body)
    assert answer.status_code == 200, answer.text
    return events_in(answer.text)


def prompt_of(server: Any) -> str:
    return server.core.tokenizer.decode(server.core.requests[-1].prompt_token_ids, skip_special_tokens=False)


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def without_names(value: Any) -> Any:
    """Without what differs from one response to the next."""
    text = json.dumps(value)
    text = text.replace(value["id"].removeprefix("resp_"), "ID")
    times = ("created_at", "completed_at")
    return {key: entry for key, entry in json.loads(text).items() if key not in times}


def test_a_response(client: TestClient, openai_errors: Callable[..., list[str]]) -> None:
    body = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "top_logprobs": 2,
        "reasoning": {"summary": "auto"},
        "max_output_tokens": 100,
        "text": {"format": {"type": "text"}},
        "temperature": 0.5,
        "service_tier": "auto",
        "user": "ann",
    }
    answer = post(client, **body)
    assert openai_errors("Response", answer) == []
    assert (answer["status"], text_of(answer), answer["model"]) == ("completed", TEXT, "demo")
    assert (answer["metadata"], answer["instructions"], answer["temperature"]) == ({"a": "b"}, "Be brief.", 0.5)
    tokens = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(token["token"] for token in tokens).startswith("Once upon a time")
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    usage = answer["usage"]
    assert len(tokens) == usage["output_tokens"]  # the end's, too, whether it came with the last text or by itself
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert post(client, "/v1/responses/input_tokens", input="Hi")["input_tokens"] < usage["input_tokens"]


def test_the_texts_logprobs_are_those_of_its_tokens_however_they_come(make_server: Callable[..., Any]) -> None:
    server = make_server(reasoning_parser="deepseek_r1")
    server.core.texts = ["I was. 🙂 Was I?\n</think>\n\nI was 🙂, I think."]
    with TestClient(server.app) as client:
        found = []
        for server.core.stride in range(1, 30):
            thought, message = post(client, top_logprobs=0, include=["message.output_text.logprobs"])["output"]
            assert thought["content"][0]["text"] == "I was. 🙂 Was I?"
            found.append([token["token"] for token in message["content"][0]["logprobs"]])
    assert (found[0][:2], found[0][-3:]) == (["I", " was"], [" think", ".", "<|endoftext|>"])
    assert found == [found[0]] * len(found)


@pytest.mark.parametrize("body", [{}, {"top_logprobs": 1}, {"max_output_tokens": 4}, {"background": True}], ids=str)
def test_a_stream_is_the_whole_in_pieces(
    client: TestClient, openai_errors: Callable[..., list[str]], body: dict[str, Any]
) -> None:
    events = stream(client, **body)
    for event in events:
        assert openai_errors(schema_of(event), event) == []
    kinds = [event["type"].removeprefix("response.") for event in events]
    order = list(dict.fromkeys(kinds))
    start = ["created", "queued", "in_progress"] if "background" in body else ["created", "in_progress"]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    end = "incomplete" if "max_output_tokens" in body else "completed"
    assert order == [*start, "output_item.added", *text, "output_item.done", end]
    last = events[-1]["response"]
    assert "".join(event["delta"] for event in events if event["type"].endswith("delta")) == text_of(last)
    whole = post(client, **(body | {"background": False}))
    expected = without_names(whole) | {"background": last["background"]}
    assert without_names(last) == expected
    assert get(client, last["id"]) == last
    if end == "incomplete":
        assert last["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["output"][0]["status"] == "incomplete"


def test_a_tool_call_that_is_cut_before_it_has_a_name_is_no_item(make_server: Callable[..., Any]) -> None:
    """Nor is there a message in its place, which clients would take for an answer; the next turn can follow."""
    server = make_server(tool_call_parser="hermes", enable_auto_tool_choice=True)
    server.core.texts = ['<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>']
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    body: dict[str, Any] = {"tools": tools, "tool_choice": "required", "max_output_tokens": 8}
    with TestClient(server.app) as client:
        whole = post(client, **body)
        assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert whole["output"] == []
        kinds = [event["type"].removeprefix("response.") for event in stream(client, **body)]
        assert kinds == ["created", "in_progress", "incomplete"]
        assert post(client, previous_response_id=whole["id"])["status"] == "completed"


def test_a_failure_in_mid_stream_is_an_event(
    server: Any, client: TestClient, openai_errors: Callable[..., list[str]]
) -> None:
    server.core.ending = "error"
    *_, last = stream(client)
    assert openai_errors(schema_of(last), last) == []
    assert last["type"] == "response.failed"
    assert "failed" in last["response"]["error"]["message"]
    assert client.post(PATH, json={"input": "Hi"}).status_code == 500
    background = post(client, background=True)
    assert wait(client, background["id"])["status"] == "failed"


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
def test_what_the_engine_refuses_at_once_is_an_error_and_no_stream(make_server: Callable[..., Any], path: str) -> None:
    body = {"input": "Hi"} if path == PATH else {"messages": [USER], "max_tokens": 9}
    server = make_server(queued=1)

    def refuse(num_requests: int = 1) -> None:
        raise OverloadedError("full.")

    server.llm.check_room = refuse
    with TestClient(server.app) as client:
        answer = client.post(path, json={**body, "stream": True})
        assert answer.status_code == (503 if path == PATH else 529)
        assert answer.headers["retry-after"]


ITEMS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "text": ([USER], [USER]),
    "parts": (
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
        [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
    ),
    "an assistant's": (
        [{"role": "assistant", "content": [{"type": "output_text", "text": "Yes", "annotations": []}]}],
        [{"role": "assistant", "content": "Yes"}],
    ),
    "a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}],
        [{"role": "assistant", "content": "No"}],
    ),
    "a turn with a thought and calls": (
        [
            USER,
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"role": "assistant", "content": "Well"},
            CALL,
            {**CALL, "call_id": "c2"},
            OUTPUT,
            {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "A dog."}]},
            {"role": "assistant", "content": "Both."},
        ],
        [
            USER,
            {
                "role": "assistant",
                "reasoning_content": "Hm",
                "content": "Well",
                "tool_calls": [
                    {"id": i, "type": "function", "function": {"name": "look", "arguments": '{"where": "box"}'}}
                    for i in ("c1", "c2")
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "A cat."},
            {"role": "tool", "tool_call_id": "c2", "name": "look", "content": "A dog."},
            {"role": "assistant", "content": "Both."},
        ],
    ),
    "a thought that was not sent back, of a turn that was interrupted": (
        [USER, {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}, USER],
        [USER, USER],
    ),
    "a tool that takes a text, as Codex has some": (
        [
            USER,
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": '*** "é"'},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
        ],
        [
            USER,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "apply_patch", "arguments": '{"input": "*** \\"é\\""}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "name": "apply_patch", "content": "Done."},
        ],
    ),
    "a summary": (
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
            {"role": "assistant", "content": "A"},
        ],
        [{"role": "assistant", "reasoning_content": "Hm", "content": "A"}],
    ),
}


def test_what_the_system_says_later_on_belongs_to_a_users_turn() -> None:
    """As Codex sends it; Gemma's and Mistral's templates refuse it elsewhere, and gpt-oss's drops it."""
    again, said = {"role": "developer", "content": "Rhyme."}, {"role": "assistant", "content": "Well"}
    turns = messages_of(read_items([again, USER, said, again, USER, again, again, USER], "x"), "Be brief.")
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("system", "Be brief.\n\nRhyme."),
        ("user", "Hi"),
        ("assistant", "Well"),
        ("user", "Rhyme.\n\nHi\n\nRhyme.\n\nRhyme.\n\nHi"),
    ]


def test_what_is_said_in_many_items_is_put_together_once() -> None:
    """On the event loop: to copy all that was said for each further item would take seconds."""
    system = {"role": "developer", "content": "a" * 450}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b" * 450}]}
    start = time.perf_counter()
    said, thinks = messages_of(read_items([USER, *[system] * 16_000, *[thought] * 16_000], "x"), None)
    assert time.perf_counter() - start < 2.0
    assert said["content"] == "\n\n".join(["Hi", *["a" * 450] * 16_000])
    assert thinks["reasoning_content"] == "\n".join(["b" * 450] * 16_000)


@pytest.mark.parametrize("name", ITEMS)
def test_items_make_messages(name: str) -> None:
    items, messages = ITEMS[name]
    assert messages_of(read_items(items, "x"), None) == messages
    assert messages_of(read_items(items, "x"), "Be brief.")[0] == {"role": "system", "content": "Be brief."}


def test_what_the_template_is_given(server: Any, client: TestClient) -> None:
    first = post(client, instructions="Be brief.", input=[{"role": "developer", "content": "Kindly."}, USER])
    assert prompt_of(server).endswith("|>Be brief.\n\nKindly.<|end|><|user|>Hi<|end|><|assistant|>")
    second = post(client, input="And then?", previous_response_id=first["id"])
    turns = f"<|system|>Kindly.<|end|><|user|>Hi<|end|><|assistant|>{TEXT}<|end|>"
    expected = f"<|endoftext|>{turns}<|user|>And then?<|end|><|assistant|>"
    assert prompt_of(server) == expected
    assert second["previous_response_id"] == first["id"]
    # The first one may go: what follows it has its own copy.
    assert client.delete(f"{PATH}/{first['id']}").json()["deleted"] is True
    post(client, input="And then?", previous_response_id=second["id"])
    assert prompt_of(server).startswith(expected)
    # An item by reference, as the Vercel AI SDK sends it.
    reference = {"type": "item_reference", "id": second["output"][0]["id"]}
    post(client, input=[USER, reference, {"role": "user", "content": "So?"}])
    assert prompt_of(server).endswith(f"<|assistant|>{TEXT}<|end|><|user|>So?<|end|><|assistant|>")


def test_conversations_do_not_grow_for_ever(make_server: Callable[..., Any]) -> None:
    with TestClient(make_server(max_body_bytes=3000).app) as client:
        found, answer = [post(client, input="a" * 60)], None
        while answer is None or (answer.status_code == 200 and len(found) < 30):
            body = {"input": "b" * 60, "previous_response_id": found[-1]["id"], "truncation": "auto"}
            answer = client.post(PATH, json=body)
            found += [answer.json()] * (answer.status_code == 200)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "previous_response_id")
        assert "is too long" in error["message"]
        assert client.get(f"{PATH}/{found[-1]['id']}").status_code == 200


def test_a_response_is_looked_up_once_for_all_its_items(server: Any, client: TestClient) -> None:
    """To read one of megabytes thousands of times holds up all others."""
    given = [{"role": "user", "content": str(number)} for number in range(9)]
    first = post(client, input=given)
    looked_up: list[str] = []
    store = server.app.state.responses._store
    get_stored = store.get

    async def note(key: str, owner: str) -> bytes | None:
        looked_up.append(key)
        return await get_stored(key, owner)

    store.get = note
    listed = get(client, f"{first['id']}/input_items", order="asc")["data"] + first["output"]
    looked_up.clear()
    references = [{"type": "item_reference", "id": item["id"]} for item in listed]
    second = post(client, input=[*references, USER])
    assert looked_up == [first["id"]]
    assert get(client, f"{second['id']}/input_items", order="asc")["data"][:-1] == listed
    unknown = {"type": "item_reference", "id": f"{listed[0]['id']}0"}
    assert client.post(PATH, json={"input": [*references, unknown]}).status_code == 400


def test_sampling_fields(server: Any, client: TestClient) -> None:
    post(client, temperature=0.5, top_p=0.5, top_k=3, seed=7, stop=["x"], repetition_penalty=1.1, max_output_tokens=20)
    params = server.request.task.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.5, 3, 7)
    assert (params.stop, params.repetition_penalty, server.request.task.max_tokens) == (["x"], 1.1, 20)


def test_truncation_leaves_out_the_oldest(server: Any, client: TestClient) -> None:
    items = [{"role": "user", "content": f"{number} " + "word " * 20} for number in range(10)]
    items.insert(0, {"role": "system", "content": "Rules."})
    refused = client.post(PATH, json={"input": items})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    much = client.post(PATH, json={"input": "Hi", "max_output_tokens": 10_000}).json()["error"]
    assert re.search("Lower max_output_tokens to [0-9]+ or less, or shorten the prompt.$", much["message"])
    answer = post(client, input=items, truncation="auto")
    prompt = prompt_of(server)
    assert "Rules." in prompt
    kept = [number for number in range(10) if f"<|user|>{number} " in prompt]
    assert kept == list(range(kept[0], 10))
    assert 0 < kept[0] < 9
    assert answer["truncation"] == "auto"
    listed = get(client, f"{answer['id']}/input_items")
    assert len(listed["data"]) == 11


def test_what_agents_send_besides_functions_is_left_out(client: TestClient) -> None:
    """Codex names tools that OpenAI's servers run beside its own."""
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    tools = [
        {"type": "web_search", "external_web_access": False},
        look,
        {"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "patch"}]},
    ]
    answer = client.post(PATH, json={"input": "Hi", "tools": tools, "tool_choice": "none"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["tools"][1]["name"] == "look"
    empty = client.post(PATH, json={"input": "Hi", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True})
    assert empty.status_code == 200, empty.text
    assert "'tools[0]', 'tools[2]'" in answer.headers["x-quire-warnings"]


def test_functions_of_a_namespace(make_server: Callable[..., Any], openai_errors: Callable[..., list[str]]) -> None:
    """As Codex names those of MCP servers: the model knows them by both names, and calls are told apart again."""
    server = make_server(tool_call_parser="hermes", enable_auto_tool_choice=True)
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    space = {
        "type": "namespace",
        "name": "mcp__cats",
        "description": "Cats.",
        "tools": [look, {"type": "custom", "name": "x"}],
    }
    calls = [{"name": name, "arguments": {}} for name in ("mcp__cats__look", "look")]
    server.core.texts = ["".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)]
    with TestClient(server.app) as client:
        answer = post(client, tools=[space, look], tool_choice="required")
        assert openai_errors("Response", answer) == []
        found = [(item["type"], item.get("namespace"), item["name"]) for item in answer["output"]]
        assert found == [("function_call", "mcp__cats", "look"), ("function_call", None, "look")]
        assert answer["tools"] == [space, {"strict": True} | look]
        call = {key: answer["output"][0][key] for key in ("type", "call_id", "namespace", "name", "arguments")}
        output = OUTPUT | {"call_id": call["call_id"]}
        again = post(client, input=[USER, call, output], tools=[space])
        listed = get(client, f"{again['id']}/input_items", order="asc")["data"]
        assert (listed[1]["namespace"], listed[1]["name"]) == ("mcp__cats", "look")
        assert openai_errors("ResponseItemList", get(client, f"{again['id']}/input_items")) == []
        for wrong, param in (
            ({"type": "namespace", "name": "a", "tools": ["look"]}, "tools[0]"),
            ({"type": "namespace", "tools": [look]}, "tools[0].name"),
        ):
            refused = client.post(PATH, json={"input": "Hi", "tools": [wrong]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_call_with_text_is_one_of_a_function(client: TestClient, openai_errors: Callable[..., list[str]]) -> None:
    """It is listed so, and its parts are asked for by their names."""
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "***"}
    parts = [{"type": "input_text", "text": "Done."}]
    answer = post(client, input=[USER, call, {"type": "custom_tool_call_output", "call_id": "c1", "output": parts}])
    listed = get(client, f"{answer['id']}/input_items", order="asc")
    assert openai_errors("ResponseItemList", listed) == []
    assert [item["type"] for item in listed["data"]] == ["message", "function_call", "function_call_output"]
    refused = client.post(PATH, json={"input": [USER, call | {"input": None}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1].input")


def test_the_input_is_listed_in_pages(client: TestClient, openai_errors: Callable[..., list[str]]) -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}
    items = [USER, reasoning, CALL, OUTPUT, {"role": "assistant", "content": "A"}]
    answer = post(client, input=items)
    whole = get(client, f"{answer['id']}/input_items", order="asc")
    assert openai_errors("ResponseItemList", whole) == []
    assert [item["type"] for item in whole["data"]] == [item.get("type", "message") for item in items]
    page = get(client, f"{answer['id']}/input_items", limit=2)
    seen = page["data"]
    while page["has_more"]:
        page = get(client, f"{answer['id']}/input_items", limit=2, after=page["last_id"])
        seen += page["data"]
    assert seen == whole["data"][::-1]
    assert client.get(f"{PATH}/{answer['id']}/input_items?after=other").status_code == 400


def wait(client: TestClient, response_id: str) -> dict[str, Any]:
    for _ in range(1000):
        if (response := get(client, response_id))["status"] not in ("queued", "in_progress"):
            return response
        time.sleep(0.005)
    raise AssertionError("it does not end")


def test_a_response_in_the_background(server: Any, client: TestClient, openai_errors: Callable[..., list[str]]) -> None:
    queued = post(client, background=True)
    assert (queued["status"], queued["output"], "usage" in queued) == ("queued", [], False)
    assert openai_errors("Response", queued) == []
    done = wait(client, queued["id"])
    assert (done["status"], text_of(done)) == ("completed", TEXT)
    assert client.get(f"{PATH}/{queued['id']}?stream=true").status_code == 400
    assert client.post(f"{PATH}/{queued['id']}/cancel").json() == done

    events = stream(client, background=True)
    response_id = events[0]["response"]["id"]
    again = events_in(client.get(f"{PATH}/{response_id}?stream=true&starting_after=4").text)
    assert again == events[5:]

    server.core.held = True
    held = post(client, background=True)
    refused = client.post(PATH, json={"input": "Hi", "previous_response_id": held["id"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    cancelled = client.post(f"{PATH}/{held['id']}/cancel").json()
    assert (cancelled["status"], get(client, held["id"])) == ("cancelled", cancelled)
    assert openai_errors("Response", cancelled) == []
    gone = post(client, background=True)
    assert client.delete(f"{PATH}/{gone['id']}").status_code == 200
    assert client.get(f"{PATH}/{gone['id']}").status_code == 404
    assert len(server.core.aborted) == 2
    server.core.held = False
    server.core.go_on.set()
    assert text_of(post(client)) == TEXT


def test_a_stream_that_is_taken_up_again_may_have_no_more_to_tell(server: Any, client: TestClient) -> None:
    """As of a response that is cancelled: it ends without an event, and is no error."""
    server.core.held = True
    jobs = server.app.state.responses._jobs
    with ThreadPoolExecutor(2) as threads:
        made = threads.submit(stream, client, background=True)
        while not jobs:
            time.sleep(0.005)
        ((response_id, job),) = jobs.items()
        again = threads.submit(client.get, f"{PATH}/{response_id}?stream=true&starting_after=2")
        while len(job.changed._waiters) < 2:
            time.sleep(0.005)
        assert client.post(f"{PATH}/{response_id}/cancel").json()["status"] == "cancelled"
        assert (again.result().status_code, again.result().text) == (200, "")
    assert [event["type"] for event in made.result()][-1] == "response.in_progress"


def test_responses_outlive_the_server_in_a_file(make_server: Callable[..., Any], tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    with TestClient(make_server(response_store=path).app) as client:
        first = post(client)
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}, "others' conversations"
    server = make_server(response_store=path)
    with TestClient(server.app) as client:
        assert get(client, first["id"]) == first
        post(client, input="So?", previous_response_id=first["id"])
        assert TEXT in prompt_of(server)
        server.core.held = True
        lost = post(client, background=True)["id"]
        with TestClient(make_server(response_store=path).app) as next_one:  # as if the first had been killed
            found = get(next_one, lost)
        assert (found["status"], "stopped" in found["error"]["message"]) == ("failed", True)
        assert client.post(f"{PATH}/{lost}/cancel").json()["status"] == "cancelled"
        assert client.delete(f"{PATH}/{first['id']}").status_code == 200
        assert client.get(f"{PATH}/{first['id']}").status_code == 404


def test_what_is_another_clients_is_not_there(make_server: Callable[..., Any], tmp_path: Path) -> None:
    for options in ({}, {"response_store": str(tmp_path / "responses.db")}):
        with TestClient(make_server(api_key=["a", "b"], **options).app) as client:
            client.headers["Authorization"] = "Bearer a"
            ids = [post(client)["id"], stream(client, background=True)[0]["response"]["id"]]
            item = get(client, ids[0])["output"][0]["id"]
            client.headers["Authorization"] = "Bearer b"
            for own in ids:
                asked = [client.get(f"{PATH}/{own}{rest}") for rest in ("", "?stream=true", "/input_items")]
                asked += [client.post(f"{PATH}/{own}/cancel"), client.delete(f"{PATH}/{own}")]
                asked.append(client.post(PATH, json={"input": "Hi", "previous_response_id": own}))
                assert [answer.status_code for answer in asked] == [404] * 6
                unknown = client.get(f"{PATH}/resp_0").json()["error"]["message"].replace("resp_0", own)
                assert asked[0].json()["error"]["message"] == unknown
            reference = [USER, {"type": "item_reference", "id": item}]
            assert client.post(PATH, json={"input": reference}).status_code == 400
            client.headers["Authorization"] = "Bearer a"
            assert [client.get(f"{PATH}/{own}").status_code for own in ids] == [200, 200]


def test_what_is_not_stored_is_not_there(client: TestClient, make_server: Callable[..., Any]) -> None:
    assert client.get(f"{PATH}/{post(client, store=False)['id']}").status_code == 404
    size = len(msgspec.json.encode(post(client)))
    with TestClient(make_server(response_store_max_bytes=3 * size).app) as small:
        ids = [post(small)["id"] for _ in range(4)]
        statuses = [small.get(f"{PATH}/{own}").status_code for own in ids]
        assert statuses == sorted(statuses, reverse=True)
        assert (statuses[0], statuses[-1]) == (404, 200)
    with TestClient(make_server(response_store_seconds=0.0).app) as brief:
        assert brief.get(f"{PATH}/{post(brief)['id']}").status_code == 404


def test_a_file_of_responses_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def fill() -> None:
        store = open_store(str(path), 1 << 20, 1000.0)
        for number in range(200):
            await store.put(str(number), "me", bytes(20_000))
            await store.put("again", "me", bytes(100))
        there = [number for number in range(200) if await store.get(str(number), "me") is not None]
        assert there == [*range(there[0], 200)], "the oldest go first"
        assert 40 <= len(there) <= 52
        assert await store.get("again", "me") == bytes(100)
        await store.put("large", "me", bytes(1 << 20))
        assert await store.get("199", "me") is None
        assert await store.get("large", "me") is None

    asyncio.run(fill())
    assert path.stat().st_size < 2.2 * 2**20


HUGE = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"const": 10**30}}}}
REFUSALS: dict[str, tuple[dict[str, Any], str, int]] = {
    "no input": ({"input": None}, "input", 400),
    "an empty list": ({"input": []}, "input", 400),
    "an unknown item": ({"input": [{"type": "computer_call"}]}, "input[0]", 400),
    "an item without a type": ({"input": [{}]}, "input[0]", 400),
    "a role": ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", 400),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content", 400),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", 400),
    "a file": ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content", 400),
    "a part's type": ({"input": [{"role": "user", "content": [{"type": {}, "text": "x"}]}]}, "input[0].content", 400),
    "a part's text": (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        400,
    ),
    "a call without a name": ({"input": [{**CALL, "name": None}]}, "input[0].name", 400),
    "an output of no call": ({"input": [USER, OUTPUT]}, "input", 400),
    "a summary": ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary", 400),
    "an item that is not there": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", 400),
    "previous": ({"previous_response_id": "resp_1"}, "previous_response_id", 404),
    "background without store": ({"background": True, "store": False}, "background", 400),
    "a tool's type": ({"tools": [{"type": "web_search"}]}, "tools[0]", 400),
    "a tool's name": ({"tools": [{"type": "function"}]}, "tools[0].name", 400),
    "a choice": ({"tool_choice": "both"}, "tool_choice", 400),
    "a choice's type": ({"tool_choice": {"type": "file_search"}}, "tool_choice", 400),
    "a format": ({"text": {"format": {"type": "xml"}}}, "text.format", 400),
    "include": ({"include": ["everything"]}, "include[0]", 400),
    "metadata": ({"metadata": {"a": 1}}, "metadata", 400),
    "several answers": ({"n": 2}, "n", 400),
    "beams": ({"use_beam_search": True}, "use_beam_search", 400),
    "a conversation": ({"conversation": "conv_1"}, "conversation", 400),
    "a prompt template": ({"prompt": {"id": "p"}}, "prompt", 400),
    "temperature": ({"temperature": 3}, "temperature", 400),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens", 400),
    "too many tokens": ({"max_output_tokens": 1000}, "max_output_tokens", 400),
    "a number that JSON's readers may not hold": ({"max_tool_calls": 10**30}, None, 400),
    "such a number in a schema": ({"text": {"format": HUGE}}, None, 400),
    "another model": ({"model": "other"}, "model", 404),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(shared_client: TestClient, openai_errors: Callable[..., list[str]], name: str) -> None:
    body, param, status = REFUSALS[name]
    for streams in (False, True):
        answer = shared_client.post(PATH, json={"input": "Hi", "stream": streams} | body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param
        assert openai_errors("ErrorResponse", answer.json()) == []
    assert text_of(post(shared_client)) == TEXT


def test_a_schema_that_is_elsewhere_is_told_where_it_belongs(client: TestClient) -> None:
    of_a_chat = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    answer = client.post(PATH, json={"input": "Hi", "text": {"format": of_a_chat}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "text.format")
    assert error["message"] == "text.format.schema must be a JSON schema, right there; it is None."


def test_compaction_is_refused(client: TestClient) -> None:
    answer = client.post("/v1/responses/compact", json={"model": "demo", "input": "Hi"})
    assert answer.status_code == 400
    assert "/v1/responses/compact is not supported: 'truncation': 'auto'" in answer.json()["error"]["message"]


def test_only_an_input_of_many_parts_is_read_in_a_thread(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []

    def read(*given: Any) -> list[dict[str, Any]]:
        on_loop.append(asyncio._get_running_loop() is not None)
        return read_items(*given)

    monkeypatch.setattr(responses, "read_items", read)
    many = {"role": "user", "content": [{"type": "input_text", "text": ""}] * 100}
    for given in ("Hi", [USER], [many]):
        client.post(PATH, json={"input": given})
    assert on_loop == [True, True, False]
