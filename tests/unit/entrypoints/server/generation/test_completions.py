"""/v1/completions: the shapes of answers and streams, echo and logprobs, several prompts, and what fails on its way."""

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quire.entrypoints.server import service
from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.dialects.completions import CompletionWriter
from quire.errors import OverloadedError
from quire.protocol.step import Failure, FailureKind
from quire.text.tokenizer import Tokenizer

PATH = "/v1/completions"
TEXT = "Once upon a time there was a café."
NO_TOKEN_LEFT = Failure(FailureKind.BAD_REQUEST, "no token is left to choose")


def post(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={"prompt": "Hi", "temperature": 1.0, "max_tokens": 50} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, parsed: Callable[[str], list[Any]], **body: Any) -> list[dict[str, Any]]:
    answer = client.post(PATH, json={"prompt": "Hi", "temperature": 1.0, "max_tokens": 50, "stream": True} | body)
    assert answer.status_code == 200, answer.text
    return parsed(answer.text)


def test_an_answer(client: TestClient, openai_errors: Callable[..., list[str]]) -> None:
    answer = post(client, model="alias", request_id="mine")
    assert openai_errors("CreateCompletionResponse", answer) == []
    assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-mine", "text_completion", "alias")
    choice = {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    # Clients read what vLLM adds as attributes, asked for or not.
    assert answer["choices"] == [choice | {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}]
    usage = answer["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


def test_the_header_names_a_request(client: TestClient) -> None:
    headers = {"X-Request-Id": "from-the-header"}
    body = {"prompt": "Hi", "max_tokens": 1}
    assert client.post(PATH, json=body, headers=headers).json()["id"] == "cmpl-from-the-header"
    assert client.post(PATH, json=body | {"request_id": "x"}, headers=headers).json()["id"] == "cmpl-x"
    one, other = (client.post(PATH, json=body).json()["id"] for _ in range(2))
    assert one != other


def test_a_stream_adds_up(client: TestClient, parsed: Any, openai_errors: Callable[..., list[str]]) -> None:
    whole = post(client, n=3)
    chunks = stream(client, parsed, n=3, stream_options={"include_usage": True})
    for chunk in chunks:  # OpenAI sends these nulls too, and has no schema of its own for chunks
        ended = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
        assert openai_errors("CreateCompletionResponse", chunk | {"choices": ended, "usage": whole["usage"]}) == []
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    last = chunks.pop()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        assert all(piece["text"] for piece in pieces[:-1]), "no empty pieces"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False, "continuous_usage_stats": True}])
def test_a_plain_stream_has_no_usage(client: TestClient, parsed: Any, options: Any) -> None:
    assert all("usage" not in chunk for chunk in stream(client, parsed, stream_options=options))


def test_continuous_usage(client: TestClient, parsed: Any) -> None:
    chunks = stream(
        client, parsed, max_tokens=4, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert chunks.pop()["choices"] == []
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == 4


def test_choices_are_numbered_prompt_by_prompt(client: TestClient, parsed: Any) -> None:
    whole = post(client, prompt=["One", "Two", "Three"], n=2, max_tokens=2)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts[:2] == texts[2:4] == texts[4:] != [texts[0]] * 2
    chunks = stream(client, parsed, prompt=["One", "Two", "Three"], n=2, max_tokens=2)
    for index, text in enumerate(texts):
        assert "".join(p["text"] for chunk in chunks for p in chunk["choices"] if p["index"] == index) == text
    assert post(client, prompt=[[5], [6, 7]], max_tokens=1)["usage"]["prompt_tokens"] == 3


def test_several_prompts_run_at_once(server: Any) -> None:
    async def run() -> None:
        server.core.held = True
        body = CompletionRequest.model_validate({"prompt": [[i] for i in range(1, 41)], "max_tokens": 2})
        task = asyncio.create_task(server.completions.create(body, "many"))
        while len(server.core.requests) < 40:
            await asyncio.sleep(0.001)
        server.core.go_on.set()
        assert len(json.loads(b"".join(await task))["choices"]) == 40
        assert server.core.aborted == []

    asyncio.run(run())
    assert [r.request_id.partition("#")[0] for r in server.core.requests] == [f"many-{i}" for i in range(40)]


@pytest.mark.parametrize("streams", [False, True])
def test_one_bad_prompt_ends_all(client: TestClient, server: Any, streams: bool) -> None:
    answer = client.post(PATH, json={"prompt": [[1], [2], [999_999]], "stream": streams})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert server.llm.num_unfinished == 0
    assert len(server.core.aborted) == len(server.core.requests)


def test_prompts_that_the_queue_can_never_hold_are_refused_at_once(make_server: Callable[..., Any]) -> None:
    server = make_server({"max_num_seqs": 4}, queued=4)
    with TestClient(server.app) as client:
        assert client.post(PATH, json={"prompt": [[5]] * 8, "max_tokens": 1}).status_code == 200
        answer = client.post(PATH, json={"prompt": [[5]] * 9, "max_tokens": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert "at most 8" in answer.json()["error"]["message"]
        server.core.held = True
        assert len(server.core.requests) == 8


def test_prompts_without_room_cost_nothing(make_server: Callable[..., Any]) -> None:
    """All of a request is queued, or nothing."""
    server = make_server({"max_num_seqs": 4}, queued=4)

    async def run() -> None:
        server.core.held = True
        bodies = [CompletionRequest.model_validate({"prompt": [[5]] * count}) for count in (4, 5)]
        task = asyncio.create_task(server.completions.create(bodies[0], "first"))
        while len(server.core.requests) < 4:
            await asyncio.sleep(0.001)
        with pytest.raises(OverloadedError):
            await server.completions.create(bodies[1], "second")
        assert len(server.core.requests) == 4
        server.core.go_on.set()
        await task

    asyncio.run(run())


def test_best_of(client: TestClient, server: Any) -> None:
    answer = post(client, best_of=4, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    # The likeliest are the shortest, as each token has the same logprob.
    assert [choice["text"] for choice in answer["choices"]] == ["Four", "Thrice"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert server.request.task.num_sequences == 4


def test_stop_strings(client: TestClient) -> None:
    choice = post(client, stop=[" there", "zz"])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Once upon a time", "stop", " there")
    kept = post(client, stop=" there", include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "Once upon a time there"


# --- echo and logprobs


def test_echo(client: TestClient, parsed: Any, demo_tokenizer: Tokenizer) -> None:
    assert post(client, echo=True)["choices"][0]["text"] == "Hi" + TEXT
    chunks = stream(client, parsed, echo=True, n=2)
    for index in range(2):
        pieces = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert pieces[0].startswith("Hi")
        assert len(pieces[0]) > 2, "the first piece has the first token too"
    ids = demo_tokenizer.encode("Hello there")
    assert post(client, prompt=ids, echo=True)["choices"][0]["text"] == "Hello there" + TEXT
    cut = post(client, prompt="Hello there", echo=True, truncate_prompt_tokens=1)["choices"][0]["text"]
    assert cut == " there" + TEXT
    raw = post(client, prompt=ids, echo=True, skip_special_tokens=False)["choices"][0]["text"]
    assert raw.startswith("<|endoftext|>Hello")


def test_logprobs(client: TestClient, parsed: Any) -> None:
    """(A character of several tokens has the place of its first; what follows it is counted a little late.)"""
    choice = post(client, logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]).startswith(TEXT.partition("é")[0])
    assert all(value == -0.7 for value in logprobs["token_logprobs"])
    for token, top, offset in zip(*(logprobs[k] for k in ("tokens", "top_logprobs", "text_offset")), strict=True):
        assert top[token] == -0.7
        assert len(top) == 2
        assert max(top.values()) == -0.6
        if offset < TEXT.index("é"):
            assert choice["text"].startswith(token, offset)
    chunks = stream(client, parsed, logprobs=2)
    for key, values in logprobs.items():
        assert [v for chunk in chunks for v in chunk["choices"][0]["logprobs"][key]] == values


AMPLIFIED = {"prompt": [[5] * 60] * 3, "n": 16, "echo": True, "logprobs": 20, "max_tokens": 1}


def test_an_answers_size_is_bounded(make_server: Callable[..., Any]) -> None:
    """Prompts x n x tokens x logprobs: 3 prompts of 60 tokens, 16 times, 21 entries each, and 48 more tokens."""
    size = (3 * 60 + 3) * 16 * 21
    server = make_server(max_answer_entries=size)
    with TestClient(server.app) as client:
        assert client.post(PATH, json=AMPLIFIED).status_code == 200
        for more in ({"n": 17}, {"max_tokens": 2}, {"return_token_ids": True}, {"prompt_logprobs": 0}):
            answer = client.post(PATH, json=AMPLIFIED | more)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n"), more
            assert f"{size} is the most" in answer.json()["error"]["message"]
        for body, param in (({"logprobs": 20}, "logprobs"), ({"prompt_logprobs": 20}, "prompt_logprobs")):
            plain = {"prompt": [[5] * 60] * 100, "max_tokens": 40}
            assert client.post(PATH, json=plain | body).json()["error"]["param"] == param
            assert client.post(PATH, json=plain).status_code == 200, "text is free: to draw it costs more"
    assert len(server.core.requests) == 3 + 200


def test_what_the_engine_is_told_of_many_prompts_is_bounded(make_server: Callable[..., Any]) -> None:
    """It keeps the parameters of each: a megabyte of them, for a thousand prompts, would be gigabytes."""
    with TestClient(make_server(max_body_bytes=5000).app) as client:
        body = {"prompt": "a", "guided_choice": ["x" * 1000, "y" * 1000], "max_tokens": 1}
        for prompt in ("a", ["a"] * 2):
            assert "take" not in client.post(PATH, json=body | {"prompt": prompt}).text
        error = client.post(PATH, json=body | {"prompt": ["a"] * 3}).json()["error"]
        assert (error["param"], "3 prompts take" in error["message"]) == ("prompt", True)
        assert client.post(PATH, json={"prompt": ["a"] * 100, "max_tokens": 1}).status_code == 200


def test_echoed_entries_are_made_once_for_a_prompt(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []
    write = CompletionWriter._logprobs

    def noted(self: Any, token_ids: list[int], *args: Any) -> Any:
        tokens.extend(token_ids)
        return write(self, token_ids, *args)

    monkeypatch.setattr(CompletionWriter, "_logprobs", noted)
    choices = post(client, **AMPLIFIED)["choices"]
    assert len(choices) == 48
    assert len(tokens) == 3 * 60 + 48
    assert all(
        choice["logprobs"]["text_offset"][0] == 0 and len(choice["logprobs"]["tokens"]) == 61 for choice in choices
    )


@pytest.mark.parametrize("streams", [False, True])
def test_large_answers_are_written_off_the_loop(
    client: TestClient, parsed: Any, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """In parts, so that the thread that encodes them never holds the interpreter for long; and they are the same."""
    threads: set[str] = set()
    piece = CompletionWriter._piece

    def noted(self: Any, delta: Any) -> Any:
        threads.add(threading.current_thread().name)
        return piece(self, delta)

    small = [post(client, **AMPLIFIED | {"prompt": [5] * 60, "n": 1}) for _ in range(2)]
    monkeypatch.setattr(service, "_PART", 50_000)
    monkeypatch.setattr(CompletionWriter, "_piece", noted)
    if streams:
        choices = [c for chunk in stream(client, parsed, **AMPLIFIED) for c in chunk["choices"]]
        assert len({c["index"] for c in choices}) == 48
    else:
        answer = client.post(PATH, json=AMPLIFIED)
        assert int(answer.headers["content-length"]) == len(answer.content)
        choices = answer.json()["choices"]
        assert list(answer.json()) == list(small[0])
        assert [c["index"] for c in choices] == list(range(48))
    assert choices[0]["logprobs"] == small[0]["choices"][0]["logprobs"]
    assert threads
    assert all(name.startswith("asyncio") for name in threads), threads


def test_no_alternatives(client: TestClient) -> None:
    logprobs = post(client, logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{token: -0.7} for token in logprobs["tokens"]]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_a_prompt(client: TestClient, parsed: Any, server: Any, max_tokens: int) -> None:
    """As lm-evaluation-harness asks: the prompt's logprobs, and a token that it drops."""
    prompt = [[10, 11, 12, 13], [20, 21]]
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1234}
    answer = post(client, **body)
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    for ids, choice in zip(prompt, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(ids) + max_tokens}
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert logprobs["text_offset"][0] == 0
        for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert value in top.values()
            assert max(top.values()) == -0.6, "another token is likelier"
        assert choice["finish_reason"] == "length"
    assert all(r.task.max_tokens == 1 and r.task.params.prompt_logprobs == 1 for r in server.core.requests)
    pieces = [c for chunk in stream(client, parsed, **body) for c in chunk["choices"]]
    nulls = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
    assert [c | nulls for c in sorted(pieces, key=lambda c: c["index"])] == answer["choices"]


def test_tokens_of_one_text_keep_their_entries(client: TestClient, demo_tokenizer: Tokenizer, server: Any) -> None:
    """Two broken bytes are shown alike; neither may hide the other's logprob."""
    broken = [i for i in range(300) if demo_tokenizer.decode([i], skip_special_tokens=False) == "\ufffd"]
    one = next(i for i in broken if i ^ 1 in broken)
    answer = post(client, prompt=[5, one], echo=True, logprobs=2, max_tokens=0)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"][1] == "\ufffd"
    assert logprobs["top_logprobs"][1] == {"\ufffd": -0.7, f"token_id:{one ^ 1}": -0.6}


def test_offsets_are_places_in_the_text(client: TestClient) -> None:
    choice = post(client, prompt="<|user|>Hello", echo=True, logprobs=1, max_tokens=3)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:2] == ["<|endoftext|>", "<|user|>"], "the first one was added, and is not in the text"
    assert logprobs["text_offset"][:2] == [0, 0]
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:]:
        assert choice["text"].startswith(token, offset)


def test_infinite_logprobs_are_numbers(client: TestClient, monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    token = server.core._token
    monkeypatch.setattr(server.core, "_token", lambda *args: with_logprob(token(*args), float("-inf")))
    logprobs = post(client, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]


def with_logprob(news: Any, value: float) -> Any:
    for entry in news.logprobs:
        entry.logprobs[:] = [value] * len(entry.logprobs)
    return news


def test_tokens_as_ids(make_server: Callable[..., Any], client: TestClient) -> None:
    body = {"prompt": [5, 6], "max_tokens": 1, "logprobs": 1, "echo": True}
    logprobs = post(client, return_tokens_as_token_ids=True, **body)["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["token_id:5", "token_id:6"]
    assert logprobs["top_logprobs"][1] == {"token_id:6": -0.7, "token_id:7": -0.6}
    with TestClient(make_server(return_tokens_as_token_ids=True).app) as other:
        assert post(other, **body)["choices"][0]["logprobs"]["tokens"][0] == "token_id:5"
        by_text = post(other, **body, return_tokens_as_token_ids=False)["choices"][0]["logprobs"]["tokens"]
        assert not by_text[0].startswith("token_id:")


def test_token_ids(client: TestClient, parsed: Any) -> None:
    choice = post(client, prompt=[5, 6], max_tokens=3, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6]
    assert len(choice["token_ids"]) == 3
    chunks = stream(client, parsed, prompt=[5, 6], max_tokens=3, return_token_ids=True)
    pieces = [piece for chunk in chunks for piece in chunk["choices"]]
    assert [i for piece in pieces for i in piece["token_ids"]] == choice["token_ids"]
    assert pieces[0]["prompt_token_ids"] == [5, 6]
    assert not any("prompt_token_ids" in piece for piece in pieces[1:])


def test_prompt_logprobs(client: TestClient) -> None:
    choice = post(client, prompt=[5, 6], prompt_logprobs=1, max_tokens=1)["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert {k: (v["logprob"], v["rank"]) for k, v in second.items()} == {"6": (-0.7, 2), "7": (-0.6, 1)}
    assert choice["logprobs"] is None


# --- failures on the way


def test_a_failed_request_is_one_line_of_the_log(
    client: TestClient, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """However many sequences it has, and whatever it is called; a client's own fault is none of the operator's."""
    caplog.set_level(logging.DEBUG, "quire")
    body = {"prompt": [[5], [6]], "n": 100, "max_tokens": 9, "request_id": "r" * 200}
    server.core.ending, server.core.failure = "error", NO_TOKEN_LEFT
    assert client.post(PATH, json=body).status_code == 400
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert len([message for message in caplog.messages if NO_TOKEN_LEFT.message in message]) <= 2
    caplog.clear()
    server.core.failure = Failure(FailureKind.INTERNAL, "RuntimeError while its token was chosen")
    assert client.post(PATH, json=body).status_code == 500
    warnings = [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG]
    assert 1 <= len(warnings) <= 2
    assert all(len(message) < 300 for message in warnings)


@pytest.mark.parametrize("given", [b"\x1b[2K\x1b[1A\x1b[31mFAKE", b"\x9b1A", b"a\x85b", b"\x07"])
def test_ids_that_would_control_a_terminal_are_replaced(client: TestClient, given: bytes) -> None:
    answer = client.post(PATH, json={"prompt": "Hi", "max_tokens": 1}, headers=[(b"x-request-id", given)])
    assert re.fullmatch("cmpl-[0-9a-f]{32}", answer.json()["id"])


def test_the_engine_knows_requests_by_harmless_ids(client: TestClient, server: Any) -> None:
    post(client, request_id="caf\u00e9-" + "x" * 190, max_tokens=1)
    assert re.fullmatch(r"caf\\xe9-x{59}#0", server.request.request_id)


@pytest.mark.parametrize(("ending", "status"), [("abort", 503), ("error", 500)])
def test_failures(client: TestClient, server: Any, parsed: Any, ending: str, status: int) -> None:
    server.core.ending = ending
    answer = client.post(PATH, json={"prompt": "Hi"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "server_error")
    *chunks, last = stream(client, parsed)
    assert chunks
    assert last["error"]["type"] == "server_error"
    assert not any(c["finish_reason"] for chunk in chunks for c in chunk["choices"])


@pytest.mark.parametrize("streams", [False, True])
def test_a_dead_engine(client: TestClient, server: Any, streams: bool) -> None:
    post(client)  # the engine belongs to an event loop from now on
    server.core.die()
    answer = client.post(PATH, json={"prompt": "Hi", "stream": streams})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_dead")


@pytest.mark.parametrize("streams", [False, True])
def test_a_stopped_engine(client: TestClient, server: Any, streams: bool) -> None:
    server.llm.shutdown()
    answer = client.post(PATH, json={"prompt": "Hi", "stream": streams})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_masks_every_token(client: TestClient, server: Any, parsed: Any, n: int) -> None:
    server.core.ending, server.core.failure = "error", NO_TOKEN_LEFT
    answer = client.post(PATH, json={"prompt": "Hi", "n": n})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, NO_TOKEN_LEFT.message)
    assert stream(client, parsed, n=n)[-1]["error"]["type"] == "invalid_request_error"


def test_without_a_tokenizer(make_server: Callable[..., Any], parsed: Any) -> None:
    with TestClient(make_server({"skip_tokenizer_init": True}).app) as client:
        choice = post(client, prompt=[5, 6], max_tokens=2, logprobs=1, return_token_ids=True)["choices"][0]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        chunks = stream(client, parsed, prompt=[5], max_tokens=2, return_token_ids=True)
        assert sum(len(piece["token_ids"]) for chunk in chunks for piece in chunk["choices"]) == 2
        for body, param in (({"prompt": "Hi"}, "prompt"), ({"prompt": [5], "echo": True}, "echo")):
            answer = client.post(PATH, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
