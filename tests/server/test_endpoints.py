"""Each endpoint and each parameter of API.md against a real server: what it answers, and that what it says is so."""

import itertools
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import RunningServer

from quire import __version__
from tests.waiting import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Who is there?"}]
TEMPLATE = (
    "{{ messages[-1].content }}{{ mood }}{{ reasoning_effort }}{{ verbosity }}"
    "{% for document in documents or [] %}{{ document.text }}{% endfor %}"
)
PRIORITY = ["--scheduling-policy", "priority", "--max-num-seqs", "1", "--chat-template", TEMPLATE]
NAMED = ["--served-model-name", '["first", "second"]', "--return-tokens-as-token-ids", "--response-role", "narrator"]
FORCED_END = {"logit_bias": {"4": 100}}  # the end of a turn, whatever the model thinks


@pytest.fixture(scope="module")
def special(server_of: Callable[..., RunningServer]) -> RunningServer:
    """A server that runs one request at a time, by priority, with a template that has variables, and other names."""
    return server_of(*PRIORITY, *NAMED)


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ids_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


# Small endpoints.


def test_models(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "quire")
    assert model == sdk.models.retrieve("demo")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.models.retrieve("other")


def test_served_names(special: RunningServer) -> None:
    assert [model["id"] for model in special.get("/v1/models").json()["data"]] == ["first", "second"]
    for name, shown in ((None, "first"), ("first", "first"), ("second", "second")):
        assert special.complete("x", model=name, max_tokens=1)["model"] == shown
    assert special.post(COMPLETIONS, {"model": "demo", "prompt": "x"}).status == 404


@pytest.mark.parametrize(
    "text", ["Once upon a time", "  two  spaces\n\ttab", "héllo 😀 漢字", "<|user|>Hi<|end|>", "\x00\x1f", ""]
)
@pytest.mark.parametrize("special_tokens", [True, False])
def test_tokenize_and_back(server: RunningServer, text: str, special_tokens: bool) -> None:
    fields = {"prompt": text, "add_special_tokens": special_tokens, "return_token_strs": True}
    answer = server.post("/tokenize", fields).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    back = server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"]
    assert back == ("<|endoftext|>" if special_tokens else "") + text


def test_tokenize_counts_what_the_model_gets(server: RunningServer) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "Once upon a time"}), (CHAT, {"messages": USER})):
        answer = server.post(path, {**fields, "max_tokens": 1, "return_token_ids": True}).json()
        tokenized = server.post("/tokenize", fields).json()
        assert tokenized["count"] == answer["usage"]["prompt_tokens"]
        assert tokenized["tokens"] == answer.get("prompt_token_ids", answer["choices"][0].get("prompt_token_ids"))


def test_tokenizer_info(server: RunningServer) -> None:
    info = server.get("/tokenizer_info").json()
    assert (info["vocab_size"], info["model_max_length"], info["bos_token"]) == (4096, 512, "<|endoftext|>")
    assert "messages" in info["chat_template"]


def test_health_and_version(server: RunningServer) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = server.request(method, path)
        assert (answer.status, answer.body) == (200, b"")
    assert server.get("/version").json() == {"version": __version__}


def test_docs(server: RunningServer) -> None:
    description = server.get("/openapi.json").json()
    assert description["info"]["version"] == __version__
    assert {COMPLETIONS, CHAT, "/v1/models", "/tokenize", "/detokenize", "/metrics"} <= description["paths"].keys()
    assert b"/openapi.json" in server.get("/docs").body


def test_load_counts_requests_in_flight(server: RunningServer) -> None:
    """From their first line on: this one stays as long as its last byte is kept back."""
    assert server.get("/load").json() == {"server_load": 0}
    body = json.dumps({"prompt": "x", "max_tokens": 5, "stream": True}).encode()
    lines = [
        f"POST {COMPLETIONS} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    head = "\r\n".join([*lines, "", ""])
    with server.connect() as connection:
        connection.sendall(head.encode() + body[:-1])
        wait_until(lambda: server.get("/load").json() == {"server_load": 1}, 30.0)
        connection.sendall(body[-1:])
        assert connection.recv(100)
    wait_until(lambda: server.get("/load").json() == {"server_load": 0}, 5.0)


# Metrics.


def test_metrics_count_exactly(server: RunningServer) -> None:
    server.wait_idle()
    before = server.metrics()
    shared = "All the tokens of this one prompt are counted, and those of its first block are found again. " * 2
    usages = [
        server.complete("Once upon a time", max_tokens=7, ignore_eos=True)["usage"],
        server.complete(["One", "Two of them"], max_tokens=5, ignore_eos=True)["usage"],
        server.complete("Three", max_tokens=4, n=3, temperature=1, seed=1, ignore_eos=True)["usage"],
        server.complete(shared, max_tokens=1)["usage"],
        server.complete(shared, max_tokens=1)["usage"],
        server.chat("Hi", max_tokens=300)["usage"],
        server.stream(CHAT, {"messages": USER, "max_tokens": 9, "stream_options": {"include_usage": True}})[-1][
            "usage"
        ],
    ]
    num_requests, num_sequences = 8, 10  # two prompts are two requests, three choices are one
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[4] >= 32
    server.wait_idle()
    wait_until(lambda: server.metrics()["vllm:e2e_request_latency_seconds_count"] >= num_requests, 10.0)
    after = server.metrics()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert grown["vllm:prompt_tokens_total"] == prompt_tokens
    assert grown["vllm:generation_tokens_total"] == generated
    assert grown["vllm:prefix_cache_queries_total"] == prompt_tokens
    assert grown["vllm:prefix_cache_hits_total"] == grown["vllm:prompt_tokens_cached_total"] == sum(cached)
    assert grown["vllm:request_success_total"] == num_sequences
    assert grown["vllm:request_prompt_tokens_sum"] == prompt_tokens
    assert grown["vllm:request_generation_tokens_sum"] == generated
    assert grown["vllm:inter_token_latency_seconds_count"] == generated - num_sequences
    assert grown["vllm:request_params_n_sum"] == num_requests + 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grown[f"vllm:{name}_seconds_count"] == num_requests, name
    assert grown["vllm:num_preemptions_total"] == 0


def test_metrics_have_the_names_of_dashboards(server: RunningServer) -> None:
    answer = server.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    page = Path(__file__).resolve().parents[3] / "shared" / "API.md"
    if not page.is_file():
        pytest.skip("needs ../shared beside the repository")
    names = set(re.findall(r"`(vllm:\w+)`", page.read_text()))
    assert len(names) >= 13
    samples = server.metrics()
    assert {name for name in names if name not in samples and f"{name}_count" not in samples} == set()


# Streams.

STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 40}),
    "drawn": (COMPLETIONS, {"prompt": "Once upon", "max_tokens": 20, "temperature": 1.5, "seed": 7, "n": 3}),
    "several prompts": (COMPLETIONS, {"prompt": ["One", "Two", "Once upon"], "max_tokens": 9}),
    "to a stop string": (COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 40, "stop": ["he mids", "zz"]}),
    "with the stop string": (
        COMPLETIONS,
        {"prompt": "Once upon a time", "max_tokens": 40, "stop": "he mids", "include_stop_str_in_output": True},
    ),
    "characters of several tokens": (
        COMPLETIONS,
        {
            "prompt": "x",
            "max_tokens": 24,
            "temperature": 1,
            "seed": 3,
            "allowed_token_ids": [132, 107, 177, 258, 251, 227],
        },
    ),
    "echo": (COMPLETIONS, {"prompt": ["Once upon", "The"], "max_tokens": 4, "echo": True, "logprobs": 1}),
    "special tokens": (
        COMPLETIONS,
        {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "skip_special_tokens": False, **FORCED_END},
    ),
    "no text at all": (COMPLETIONS, {"prompt": "x", "max_tokens": 9, **FORCED_END}),
    "chat": (CHAT, {"messages": USER, "max_tokens": 30}),
    "chat with logprobs": (CHAT, {"messages": USER, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}),
    "chat's choices": (CHAT, {"messages": USER, "max_tokens": 9, "temperature": 1, "seed": 2, "n": 4}),
    "chat of no text": (CHAT, {"messages": USER, **FORCED_END}),
}


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream, each put together from its pieces."""
    whole: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        so_far = whole.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": None})
        assert "finish_reason" not in so_far, "a piece after the last one"
        so_far["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        so_far["token_ids"] += choice["token_ids"]
        for key, values in (choice["logprobs"] or {}).items():
            so_far["logprobs"] = so_far["logprobs"] or {}
            so_far["logprobs"][key] = so_far["logprobs"].get(key, []) + (values or [])
        if choice["finish_reason"] is not None:
            so_far |= {key: choice[key] for key in ("finish_reason", "stop_reason")}
    return [whole[index] for index in sorted(whole)]


@pytest.mark.parametrize("name", STREAMED)
def test_stream_is_the_whole_answer_in_pieces(server: RunningServer, name: str) -> None:
    path, fields = STREAMED[name]
    fields = {"temperature": 0, "return_token_ids": True, **fields}
    whole = server.post(path, fields).json()
    events = server.stream(path, {**fields, "stream_options": {"include_usage": True}})
    choices = joined(events)
    assert [choice["text"] for choice in choices] == texts_of(whole)
    assert [choice["token_ids"] for choice in choices] == ids_of(whole)
    for choice, expected in zip(choices, whole["choices"], strict=True):
        assert (choice["finish_reason"], choice["stop_reason"]) == (expected["finish_reason"], expected["stop_reason"])
        logprobs = expected["logprobs"]
        assert choice["logprobs"] == (logprobs and {key: values or [] for key, values in logprobs.items()})
    assert events[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"]
    }
    assert whole["usage"]["completion_tokens"] == sum(map(len, ids_of(whole)))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_first_chunk_has_the_first_token(server: RunningServer, path: str) -> None:
    prompt = {"prompt": "Once upon a time"} if path == COMPLETIONS else {"messages": USER}
    events = server.stream(path, {**prompt, "max_tokens": 8})
    first = events[0]["choices"][0]
    if path == CHAT:
        assert first["delta"]["role"] == "assistant"
        assert first["delta"]["content"]
        assert all("role" not in event["choices"][0]["delta"] for event in events[1:])
    else:
        assert first["text"]
    assert [bool(event["choices"][0]["finish_reason"]) for event in events] == [False] * (len(events) - 1) + [True]


def test_usage_on_every_chunk(server: RunningServer) -> None:
    fields = {"prompt": "Once upon a time", "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream(COMPLETIONS, {**fields, "stream_options": options})
    last = events.pop()
    seen = 0
    for event in events:
        seen += sum(len(choice["token_ids"]) for choice in event["choices"])
        assert event["usage"]["completion_tokens"] == seen
        assert event["usage"]["prompt_tokens"] == 6
    assert seen == 6
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)


def test_many_streams_at_once_are_what_they_are_alone(server: RunningServer) -> None:
    fields = [
        {"prompt": f"Story {i}:", "max_tokens": 12, "temperature": 1.0, "seed": i, "return_token_ids": True}
        for i in range(24)
    ]
    alone = [ids_of(server.complete(**each)) for each in fields]
    together: list[Any] = [None] * len(fields)

    def run(place: int) -> None:
        together[place] = [choice["token_ids"] for choice in joined(server.stream(COMPLETIONS, fields[place]))]

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(fields))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_sdk(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}], temperature=0)
    pieces = sdk.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    completion = sdk.completions.create(model="demo", prompt=["One", "Two"], max_tokens=3, extra_body={"top_k": 1})
    assert [choice.index for choice in completion.choices] == [0, 1]
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model="demo", prompt="x", max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
    with sdk.completions.create(model="demo", prompt="x", max_tokens=500, stream=True) as stream:
        next(iter(stream))  # and leave


# Logprobs and echo.


def test_echo_with_logprobs(server: RunningServer) -> None:
    answer = server.complete("Once upon a time", echo=True, logprobs=2, max_tokens=3)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("Once upon a time")
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == "<|endoftext|>" + choice["text"]
    places = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    assert all(choice["text"][offset:].startswith(token) for token, offset in list(places)[1:])
    for token, value, top in list(
        zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert top[token] == value
        assert 2 <= len(top) <= 3
    for value, top in zip(logprobs["token_logprobs"][6:], logprobs["top_logprobs"][6:], strict=True):
        assert value == max(top.values())  # greedy, and equal to the bit


def test_echo_alone_is_the_prompts_loglikelihood(server: RunningServer) -> None:
    """As lm-evaluation-harness asks: lists of token ids, echoed, with max_tokens 0 or 1."""
    prompts = [[0, 51, 1524, 579, 263, 571], [0, 51, 1524]]
    alone = server.complete(prompts, echo=True, logprobs=1, max_tokens=0)
    one = server.complete(prompts, echo=True, logprobs=1, max_tokens=1)
    assert alone["usage"]["completion_tokens"] == 0
    assert texts_of(alone) == ["Once upon a time", "Once"]
    for first, second, prompt in zip(alone["choices"], one["choices"], prompts, strict=True):
        assert len(first["logprobs"]["tokens"]) == len(prompt)
        assert first["finish_reason"] == "length"
        for key, values in first["logprobs"].items():
            assert second["logprobs"][key][: len(prompt)] == values
    whole = server.complete(prompts[0], prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    shown = [entry and entry[str(token)]["logprob"] for token, entry in zip(prompts[0], whole, strict=True)]
    assert shown == alone["choices"][0]["logprobs"]["token_logprobs"]


def test_offsets_leave_out_special_tokens(server: RunningServer) -> None:
    (choice,) = server.complete([0, 1, 44, 77, 4, 2], echo=True, logprobs=0, max_tokens=2)["choices"]
    assert choice["text"].startswith("Hi")
    assert choice["logprobs"]["text_offset"][:7] == [0, 0, 0, 1, 2, 2, 2]


def test_chat_logprobs(server: RunningServer) -> None:
    answer = server.chat(USER, logprobs=True, top_logprobs=3, max_tokens=8, return_token_ids=True)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    for entry in content:
        assert [top["logprob"] for top in entry["top_logprobs"]] == sorted(
            (t["logprob"] for t in entry["top_logprobs"]), reverse=True
        )
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
        assert bytes(entry["bytes"]).decode() == entry["token"]
    assert "".join(entry["token"] for entry in content).removesuffix("<|end|>") == choice["message"]["content"]


def test_tokens_as_ids(server: RunningServer, special: RunningServer) -> None:
    for where, asked in ((server, True), (special, None)):
        answer = where.complete(
            "Once", logprobs=1, max_tokens=2, return_tokens_as_token_ids=asked, return_token_ids=True
        )
        (choice,) = answer["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert not special.complete("Once", logprobs=1, max_tokens=1, return_tokens_as_token_ids=False)["choices"][0][
        "logprobs"
    ]["tokens"][0].startswith("token_id")


# Several choices, seeds, stops, prompts.


def test_seeds(server: RunningServer) -> None:
    fields = {"temperature": 1.0, "max_tokens": 16, "n": 4}
    first, again, other = (texts_of(server.complete("Once", seed=seed, **fields)) for seed in (11, 11, 12))
    assert first == again
    assert first != other
    assert len(set(first)) == 4
    free = [texts_of(server.complete("Once", temperature=1.0, max_tokens=16)) for _ in range(2)]
    assert free[0] != free[1]


def test_best_of_returns_the_likeliest(server: RunningServer) -> None:
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
    all_four = server.complete("Once", n=4, **fields)
    best = server.complete("Once", n=2, best_of=4, **fields)

    def total(choice: dict[str, Any]) -> float:
        return sum(choice["logprobs"]["token_logprobs"])

    ranked = sorted(all_four["choices"], key=total, reverse=True)
    assert texts_of(best) == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 12


def test_stop_strings(server: RunningServer) -> None:
    whole = texts_of(server.complete("Once upon a time", max_tokens=20))[0]
    stop = whole[10:13]
    end = whole.index(stop)
    for shown, fields in ((whole[:end], {}), (whole[: end + 3], {"include_stop_str_in_output": True})):
        answer = server.complete("Once upon a time", max_tokens=20, stop=["never in it", stop], **fields)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (shown, "stop", stop)


def test_stop_tokens(server: RunningServer) -> None:
    (whole,) = ids_of(server.complete("Once upon a time", max_tokens=9, return_token_ids=True))
    answer = server.complete("Once upon a time", max_tokens=9, stop_token_ids=[whole[4]], return_token_ids=True)
    (choice,) = answer["choices"]
    place = whole.index(whole[4])
    assert (choice["token_ids"], choice["stop_reason"]) == (whole[: place + 1], whole[4])
    assert choice["finish_reason"] == "stop"


def test_prompts_of_one_request_are_as_alone(server: RunningServer) -> None:
    prompts = ["Once upon a time", "The", "A man"]
    together = server.complete(prompts, max_tokens=6, n=2, temperature=1, seed=4)
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    alone = [server.complete(prompt, max_tokens=6, n=2, temperature=1, seed=4) for prompt in prompts]
    assert texts_of(together) == [text for answer in alone for text in texts_of(answer)]
    assert together["usage"]["total_tokens"] == sum(answer["usage"]["total_tokens"] for answer in alone)
    ids = [server.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in prompts]
    assert texts_of(server.complete(ids, max_tokens=6)) == texts_of(server.complete(prompts, max_tokens=6))


def test_cached_tokens(server: RunningServer) -> None:
    text = "A prompt that nobody else sends, and that is longer than a block of the cache, which has 32 tokens. " * 2

    def cached(**fields: Any) -> int:
        return server.complete(text, max_tokens=1, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached() >= 32] == [0, True]
    assert [cached(cache_salt="mine"), cached(cache_salt="mine") >= 32, cached(cache_salt="yours")] == [0, True, 0]


def test_beams(server: RunningServer) -> None:
    """The n best of best_of beams, in their order; nothing is streamed."""
    asked = {"use_beam_search": True, "best_of": 4, "max_tokens": 12}
    answer = server.complete("Once upon a time", n=3, logprobs=1, return_token_ids=True, **asked)
    choices = answer["choices"]
    scores = [sum(c["logprobs"]["token_logprobs"]) / len(c["token_ids"]) for c in choices]
    assert scores == sorted(scores, reverse=True)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len(set(texts_of(answer))) == 3
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    greedy = server.complete("Once upon a time", max_tokens=12, temperature=0, logprobs=0)
    best = sum(choices[0]["logprobs"]["token_logprobs"])
    assert best >= sum(greedy["choices"][0]["logprobs"]["token_logprobs"])
    chat = server.post(CHAT, {"messages": USER, **asked})
    assert chat.status == 200
    refused = server.post(COMPLETIONS, {"prompt": "x", "stream": True, **asked})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "use_beam_search")


# Every parameter has an effect, or is refused by name.

LONG = {"prompt": "Once upon a time", "max_tokens": 12}
DRAWN = {**LONG, "temperature": 1.0, "seed": 1}
CONTROL = {"prompt": "<|user|>Hi", "max_tokens": 3}
EFFECTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "max_tokens": (COMPLETIONS, LONG, 3),
    "temperature": (COMPLETIONS, DRAWN, 2.0),
    "top_p": (COMPLETIONS, DRAWN, 0.01),
    "top_k": (COMPLETIONS, DRAWN, 1),
    "min_p": (COMPLETIONS, DRAWN, 1.0),
    "seed": (COMPLETIONS, DRAWN, 2),
    "n": (COMPLETIONS, DRAWN, 2),
    "best_of": (COMPLETIONS, DRAWN, 8),
    "repetition_penalty": (COMPLETIONS, LONG, 3.0),
    "presence_penalty": (COMPLETIONS, {**LONG, "max_tokens": 40}, 2.0),
    "frequency_penalty": (COMPLETIONS, {**LONG, "max_tokens": 40}, 2.0),
    "logit_bias": (COMPLETIONS, LONG, {"16": -100}),
    "bad_words": (COMPLETIONS, LONG, ["two"]),
    "allowed_token_ids": (COMPLETIONS, LONG, [5, 6, 7]),
    "stop": (COMPLETIONS, LONG, "two"),
    "stop_token_ids": (COMPLETIONS, LONG, [658]),
    "include_stop_str_in_output": (COMPLETIONS, {**LONG, "stop": "two"}, True),
    "ignore_eos": (COMPLETIONS, {**LONG, **FORCED_END}, True),
    "min_tokens": (COMPLETIONS, {**LONG, **FORCED_END}, 4),
    "skip_special_tokens": (COMPLETIONS, {**LONG, **FORCED_END, "ignore_eos": True}, False),
    "logprobs": (COMPLETIONS, LONG, 1),
    "prompt_logprobs": (COMPLETIONS, LONG, 1),
    "echo": (COMPLETIONS, LONG, True),
    "return_token_ids": (COMPLETIONS, LONG, True),
    "return_tokens_as_token_ids": (COMPLETIONS, {**LONG, "logprobs": 1}, True),
    "truncate_prompt_tokens": (COMPLETIONS, LONG, 2),
    "add_special_tokens": (COMPLETIONS, LONG, False),
    "request_id": (COMPLETIONS, LONG, "mine"),
    "add_generation_prompt": (CHAT, {"messages": USER, "max_tokens": 5}, False),
    "continue_final_message": (
        CHAT,
        {"messages": [*USER, {"role": "assistant", "content": "It is"}], "max_tokens": 5},
        True,
    ),
    "top_logprobs": (CHAT, {"messages": USER, "max_tokens": 2, "logprobs": True}, 2),
    "max_completion_tokens": (CHAT, {"messages": USER, "max_tokens": 5}, 2),
}
REFUSED: dict[str, tuple[str, Any]] = {
    "length_penalty": (COMPLETIONS, 0.5),  # without use_beam_search
    "suffix": (COMPLETIONS, "x"),
    "priority": (COMPLETIONS, 1),
    "ttft_target": (COMPLETIONS, 0.5),
    "tpot_target": (CHAT, 0.5),
    "structured_outputs": (COMPLETIONS, {"regex": "(x"}),
    "guided_json": (COMPLETIONS, {"type": "object", "not": {}}),
    "response_format": (CHAT, {"type": "xml"}),
    "tool_choice": (CHAT, "required"),
    "function_call": (CHAT, "auto"),
    "modalities": (CHAT, ["audio"]),
    "audio": (CHAT, {"voice": "x"}),
    "chat_template": (CHAT, "x"),
}
# Those that have tests of their own; of no effect with a tokenizer whose tokens carry their own spaces.
ELSEWHERE = {
    "use_beam_search", "cache_salt", "chat_template_kwargs", "priority", "spaces_between_special_tokens", "speculative",
    "reasoning_effort",
}  # fmt: skip


def said(answer: dict[str, Any]) -> Any:
    """What an answer tells, but for the names and times that no two share."""
    shown = {key: value for key, value in answer.items() if key not in ("id", "created", "usage")}
    usage = {key: value for key, value in answer["usage"].items() if key != "prompt_tokens_details"}
    return shown, usage, "mine" in answer["id"]


@pytest.mark.parametrize("name", EFFECTS)
def test_parameter_has_an_effect(server: RunningServer, name: str) -> None:
    path, fields, value = EFFECTS[name]
    without, again, changed = (
        server.post(path, {"temperature": 0, **fields, **extra}) for extra in ({}, {}, {name: value})
    )
    assert changed.status == 200, changed.body
    assert said(without.json()) == said(again.json())
    assert said(without.json()) != said(changed.json())


@pytest.mark.parametrize("name", REFUSED)
def test_parameter_is_refused_by_name(server: RunningServer, name: str) -> None:
    path, value = REFUSED[name]
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    answer = server.post(path, {**prompt, "max_tokens": 1, name: value})
    assert (answer.status, answer.json()["error"]["param"]) == (400, name)
    assert server.post(path, {**prompt, "max_tokens": 1, name: None}).status == 200


def test_every_parameter_is_tested() -> None:
    page = Path(__file__).resolve().parents[3] / "shared" / "API.md"
    if not page.is_file():
        pytest.skip("needs ../shared beside the repository")
    listed = page.read_text().partition("Parameters beyond OpenAI's: ")[2].partition(".")[0]
    names = re.findall(r"\w+", listed)
    assert len(names) >= 20
    assert set(names) - EFFECTS.keys() - REFUSED.keys() - ELSEWHERE == set()


def test_bounds_of_the_output(server: RunningServer) -> None:
    for fields, count, reason in (
        ({}, 1, "stop"),
        ({"min_tokens": 4}, 5, "stop"),
        ({"ignore_eos": True}, 9, "length"),
        ({"min_tokens": 9}, 9, "length"),
    ):
        answer = server.complete("Once", max_tokens=9, return_token_ids=True, **FORCED_END, **fields)
        (choice,) = answer["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (count, reason), fields
    free = server.complete(
        "Once", max_tokens=30, temperature=2.0, ignore_eos=True, allowed_token_ids=[7, 8], return_token_ids=True
    )
    assert set(ids_of(free)[0]) <= {7, 8}
    assert set(ids_of(server.complete("Once", logit_bias={"77": 100}, return_token_ids=True))[0]) == {77}
    default = server.complete("Once", ignore_eos=True)
    assert default["usage"]["completion_tokens"] == 16
    chat = server.chat("Hi", ignore_eos=True)
    assert chat["usage"]["total_tokens"] == 512  # to the context's end


@pytest.mark.parametrize(
    "fields",
    [
        *({"repetition_penalty": value} for value in (1e300, 1e30, 1e-30, 5e-324)),
        *({name: 5e-324, "temperature": 2} for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty")),
        *({"seed": seed, "temperature": 1} for seed in (-(2**63), 2**64 - 1, -1)),
        {"temperature": 5e-324},
        {"temperature": 1e-4},
        {"top_k": 2**63 - 1, "temperature": 1},
        {"logit_bias": {"5": 1e308, "6": -1e308}},
        {"allowed_token_ids": list(range(4096))},
    ],
    ids=str,
)
def test_extreme_values_are_taken(server: RunningServer, fields: dict[str, Any]) -> None:
    """What 32-bit floats can't hold once killed the engine."""
    answer = server.complete("Once upon a time", max_tokens=3, ignore_eos=True, logprobs=2, **fields)
    assert answer["usage"]["completion_tokens"] == 3


def test_truncated_prompts(server: RunningServer) -> None:
    ids = list(range(5, 105))
    for keep, kept in ((3, ids[-3:]), (200, ids), (-1, ids)):
        answer = server.complete(ids, truncate_prompt_tokens=keep, max_tokens=1, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == kept
    answer = server.complete([5] * 2000, truncate_prompt_tokens=-1, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 511


def test_request_ids(server: RunningServer) -> None:
    assert server.complete("x", max_tokens=1, request_id="mine")["id"] == "cmpl-mine"
    headers = {"X-Request-Id": "theirs"}
    assert server.post(CHAT, {"messages": USER, "max_tokens": 1}, **headers).json()["id"] == "chatcmpl-theirs"
    twice = [server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "request_id": "same"}) for _ in range(2)]
    assert [answer.status for answer in twice] == [200, 200]


def test_a_server_without_a_folder_loads_no_adapter(server: RunningServer) -> None:
    assert server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}).status == 400
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "a"}).status == 400


def test_final_message_goes_on(server: RunningServer) -> None:
    messages = [*USER, {"role": "assistant", "content": "It is the"}]
    fields = {"continue_final_message": True, "max_tokens": 4, "return_token_ids": True}
    answer = server.chat(messages, **fields)
    prompt = server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert prompt.endswith("<|assistant|>It is the")
    echoed = server.chat(messages, echo=True, **fields)
    assert texts_of(echoed) == ["It is the" + texts_of(answer)[0]]


# What the template's variables and the scheduling policy bring.


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("chat_template_kwargs", {"mood": "gay"}, "gay"),
        ("documents", [{"text": "doc"}], "doc"),
        ("reasoning_effort", "high", "high"),
        ("verbosity", "low", "low"),
    ],
)
def test_variables_of_the_template(special: RunningServer, name: str, value: Any, shown: str) -> None:
    answer = special.chat("Hi", max_tokens=1, return_token_ids=True, **{name: value})
    assert answer["choices"][0]["message"]["role"] == "narrator"
    assert special.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"] == "Hi" + shown


@pytest.mark.slow
def test_lower_priorities_run_first(special: RunningServer) -> None:
    tried = (order_of_waiting(special) for _ in range(20))  # where the machine stalls, nothing is seen
    assert next(order for order in tried if order is not None) == [5, 7, 9]


def order_of_waiting(server: RunningServer) -> list[int] | None:
    """The priorities of three requests in the order in which they end.

    None if they were never seen to wait together for another one, or if two ends came too close to be told apart:
    a request takes 200 steps.
    """
    ended: list[tuple[float, int]] = []

    def run(priority: int, max_tokens: int) -> None:
        server.complete("Once", max_tokens=max_tokens, ignore_eos=True, priority=priority)
        ended.append((time.monotonic(), priority))

    threads = [threading.Thread(target=run, args=args) for args in [(0, 500), (9, 200), (5, 200), (7, 200)]]
    for thread in threads:
        thread.start()
    have_waited = False
    while not ended and not have_waited:
        metrics = server.metrics()  # at one moment: what is counted at two may be counted twice
        have_waited = (metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]) == (1, 3)
    for thread in threads:
        thread.join()
    (_, first), *rest = ended
    seconds = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(ended)]
    return [priority for _, priority in rest] if have_waited and first == 0 and min(seconds) > 0.02 else None
