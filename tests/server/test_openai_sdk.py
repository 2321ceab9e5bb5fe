"""The openai SDK against a real server: what it reads into its types, how it leaves, which errors it raises.

What each parameter does is for test_endpoints; here it is that the SDK sends and understands it.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from serving import RunningServer

PROMPT = "The old house stood"
USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story."}]
LONG = {"max_tokens": 480, "n": 128, "temperature": 1.0, "extra_body": {"ignore_eos": True}}  # some seconds' work
KEY = "sk-test"
# One request runs, one waits, and further ones are refused.
NARROW = ["--api-key", KEY, "--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--enable-request-id-headers"]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def narrow(server_of: Callable[..., RunningServer]) -> RunningServer:
    return server_of(*NARROW)


def asynchronous(server: RunningServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


# What it reads.


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2, echo=True)
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "demo", "cmpl-")
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == "<|endoftext|>" + choice.text
    # As lm-eval compares them: nothing before the first token, and the choice of the greedy ones is the largest.
    first, *logprobs = choice.logprobs.token_logprobs or []
    assert first is None
    assert logprobs[-8:] == [max(top.values()) for top in (choice.logprobs.top_logprobs or [])[-8:]]
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (8, answer.usage.prompt_tokens + 8)


def test_completion_of_many_prompts(client: openai.OpenAI, server: RunningServer) -> None:
    texts = ["A cat", "Two dogs"]
    ids = [server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in texts]
    by_text = client.completions.create(model="demo", prompt=texts, max_tokens=6, temperature=0)
    by_ids = client.completions.create(model="demo", prompt=ids, max_tokens=6, temperature=0)
    alone = [client.completions.create(model="demo", prompt=t, max_tokens=6, temperature=0).choices[0] for t in texts]
    assert [choice.index for choice in by_text.choices] == [0, 1]
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices] == [c.text for c in alone]


def test_chat(client: openai.OpenAI) -> None:
    def ask() -> Any:
        return client.chat.completions.create(
            model="demo", messages=USER, max_completion_tokens=6, n=3, seed=5, logprobs=True, top_logprobs=2
        )

    answer = ask()
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "demo", "chatcmpl-")
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        tokens = choice.logprobs.content
        assert len(tokens) <= 6
        assert all(len(token.top_logprobs) == 2 for token in tokens)
        text = bytes(byte for token in tokens for byte in token.bytes).decode()
        assert text.removesuffix("<|end|>") == choice.message.content
    assert answer.choices == ask().choices, "a seed repeats"


def test_parts_and_roles(client: openai.OpenAI) -> None:
    def ask(*messages: Any) -> str | None:
        answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=8, temperature=0)
        return answer.choices[0].message.content

    plain = ask({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    parts = ask(
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    )
    assert plain == parts


def test_streams_tell_what_a_whole_answer_tells(client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "max_tokens": 24, "temperature": 0}
    usage: Any = {"stream": True, "stream_options": {"include_usage": True}}

    whole = client.completions.create(prompt=PROMPT, **fields)
    *chunks, last = client.completions.create(prompt=PROMPT, **fields, **usage)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage) == ([], whole.usage)

    answer = client.chat.completions.create(messages=USER, **fields)
    *pieces, last = client.chat.completions.create(messages=USER, **fields, **usage)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer.choices[0].message.content
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant", *[None] * (len(pieces) - 1)]
    assert pieces[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    assert (last.choices, last.usage) == ([], answer.usage)
    assert len({piece.id for piece in [*pieces, last]}) == 1


def test_stream_helper(client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "messages": USER, "temperature": 0, "stop": [","]}
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert kinds == {"chunk", "content.delta", "content.done"}
    assert final.choices[0].message.content == client.chat.completions.create(**fields).choices[0].message.content


def test_stream_of_several_choices(client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "messages": USER, "max_tokens": 8, "n": 3, "seed": 1}
    whole = client.chat.completions.create(**fields)
    texts, reasons = ["", "", ""], [""] * 3
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_asynchronous_requests_at_once(client: openai.OpenAI, server: RunningServer) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(8)]
    fields: Any = {"model": "demo", "max_tokens": 12, "temperature": 0}

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        return (await client.completions.create(prompt=prompt, **fields)).choices[0].text

    async def stream(client: openai.AsyncOpenAI, prompt: str) -> str:
        chunks = await client.completions.create(prompt=prompt, stream=True, **fields)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def ask_all() -> tuple[list[str], list[str]]:
        async with asynchronous(server) as client:
            whole = asyncio.gather(*(ask(client, prompt) for prompt in prompts))
            streamed = asyncio.gather(*(stream(client, prompt) for prompt in prompts))
            return await whole, await streamed

    whole, streamed = asyncio.run(ask_all())
    alone = [client.completions.create(prompt=prompt, **fields).choices[0].text for prompt in prompts]
    assert whole == streamed == alone


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"


def test_raw_responses(client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "messages": USER, "max_tokens": 4, "temperature": 0}
    raw = client.chat.completions.with_raw_response.create(**fields)
    assert (raw.status_code, raw.headers["content-type"]) == (200, "application/json")
    assert raw.parse().choices == client.chat.completions.create(**fields).choices

    with client.chat.completions.with_streaming_response.create(**fields, stream=True) as streaming:
        assert streaming.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in streaming.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines[:-1])


def test_parameters_of_vllm(client: openai.OpenAI, server: RunningServer) -> None:
    def ask(**extra: Any) -> Any:
        answer = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=8, temperature=1, extra_body={"return_token_ids": True, **extra}
        )
        return answer.choices[0]

    greedy = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, temperature=0).choices[0]
    assert ask(top_k=1).text == ask(min_p=1.0).text == greedy.text
    assert set(ask(allowed_token_ids=[300, 301], ignore_eos=True).token_ids) <= {300, 301}
    assert ask(stop_token_ids=[300], allowed_token_ids=[300, 301], min_tokens=8).token_ids == [301] * 8
    assert ask(truncate_prompt_tokens=2).prompt_token_ids == ask().prompt_token_ids[-2:]
    assert len(ask(prompt_logprobs=1).prompt_logprobs) == len(ask().prompt_token_ids)

    continued = client.chat.completions.create(
        model="demo",
        messages=[*USER, {"role": "assistant", "content": "Once"}],
        max_tokens=1,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True},
    )
    assert continued.model_extra is not None
    text = server.post("/detokenize", {"tokens": continued.model_extra["prompt_token_ids"]}).json()["prompt"]
    assert text.endswith("<|assistant|>Once")


# How it leaves.


def check_left_alone(server: RunningServer, before: dict[str, float]) -> None:
    """The engine went idle, and computed a part only of what was asked."""
    server.wait_idle()
    name = "vllm:generation_tokens_total"
    assert server.metrics()[name] - before[name] < LONG["n"] * LONG["max_tokens"]


def test_leaving_a_stream_ends_its_request(client: openai.OpenAI, server: RunningServer) -> None:
    before = server.metrics()
    stream = client.chat.completions.create(model="demo", messages=USER, stream=True, **LONG)
    next(stream)
    stream.close()
    check_left_alone(server, before)

    before = server.metrics()
    with client.completions.create(model="demo", prompt=PROMPT, stream=True, **LONG) as chunks:
        for _ in chunks:
            break
    check_left_alone(server, before)


def test_leaving_an_asynchronous_stream_ends_its_request(server: RunningServer) -> None:
    async def leave_stream() -> None:
        async with asynchronous(server) as client:
            stream = await client.chat.completions.create(model="demo", messages=USER, stream=True, **LONG)
            async for _ in stream:
                break
            await stream.close()

    async def cancel() -> None:
        async with asynchronous(server) as client:
            task = asyncio.create_task(client.chat.completions.create(model="demo", messages=USER, **LONG))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    for way in (leave_stream, cancel):
        before = server.metrics()
        asyncio.run(way())
        check_left_alone(server, before)


def test_timeout_ends_the_request(client: openai.OpenAI, server: RunningServer) -> None:
    before = server.metrics()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.1).chat.completions.create(model="demo", messages=USER, **LONG)
    check_left_alone(server, before)


# Which errors it raises.


def test_refused_parameters(client: openai.OpenAI) -> None:
    too_long: list[ChatCompletionMessageParam] = [{"role": "user", "content": "word " * 1000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as error:
        client.chat.completions.create(model="demo", messages=too_long)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
    assert error.value.type == "invalid_request_error"

    refused: list[dict[str, Any]] = [
        {"temperature": 3},
        {"n": 0},
        {"stop": [""]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        {"extra_body": {"early_stopping": True}},
    ]
    for fields in refused:
        name = next(iter(fields.get("extra_body", fields)))
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="demo", messages=USER, **fields)
        assert (error.value.param or "").startswith(name), (fields, error.value)


def test_what_is_not_there(client: openai.OpenAI) -> None:
    for ask in (
        lambda: client.completions.create(model="other", prompt=PROMPT),
        lambda: client.completions.create(model="other", prompt=PROMPT, stream=True),
        lambda: client.models.retrieve("other"),
    ):
        with pytest.raises(openai.NotFoundError, match="does not exist") as error:
            ask()
        assert error.value.code == "model_not_found"


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="demo", input=["A cat.", "A dog.", "A cat."])  # as base64, unasked
    first, second, again = (entry.embedding for entry in answer.data)
    assert first == again != second
    assert len(first) == 256
    assert sum(value**2 for value in first) == pytest.approx(1, abs=1e-6)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 6
    as_floats = client.embeddings.create(model="demo", input="A cat.", encoding_format="float", dimensions=5)
    assert len(as_floats.data[0].embedding) == 5
    with pytest.raises(openai.BadRequestError, match="dimensions = 257 is more"):
        client.embeddings.create(model="demo", input="x", dimensions=257)


@pytest.mark.slow
def test_keys_and_request_ids(narrow: RunningServer) -> None:
    url = f"{narrow.url}/v1"
    with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as error:
            client.models.list()
        assert error.value.code == "invalid_api_key"
        assert error.value.request_id
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        answer = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=1, extra_headers={"X-Request-Id": "mine"}
        )
        assert (answer._request_id, answer.id) == ("mine", "cmpl-mine")
        with pytest.raises(openai.BadRequestError) as refusal:
            client.completions.create(model="demo", prompt=PROMPT, n=0)
        assert refusal.value.request_id


@pytest.mark.slow
def test_overload_is_retried(narrow: RunningServer) -> None:
    statuses: list[int] = []
    waits: list[str | None] = []

    def note(response: httpx2.Response) -> None:
        statuses.append(response.status_code)
        waits.append(response.headers.get("retry-after") if response.status_code == 503 else "1")

    def ask(client: openai.OpenAI) -> int:
        answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=400, extra_body={"ignore_eos": True})
        return answer.usage.completion_tokens if answer.usage is not None else 0

    hooks = httpx2.Client(event_hooks={"response": [note]})
    with (
        openai.OpenAI(base_url=f"{narrow.url}/v1", api_key=KEY, max_retries=100, http_client=hooks) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        assert list(pool.map(ask, [client] * 6)) == [400] * 6
        assert statuses.count(200) == 6
        assert statuses.count(503) > 0, "nothing was refused: six at once, and room for two"
        assert all(wait is not None and int(wait) >= 1 for wait in waits)

        single = client.with_options(max_retries=0)
        results = list(pool.map(lambda _: _error_of(lambda: ask(single)), range(6)))
    refused = [error for error in results if error is not None]
    assert refused
    assert all(isinstance(error, openai.InternalServerError) and error.status_code == 503 for error in refused)


def _error_of(ask: Callable[[], object]) -> Exception | None:
    try:
        ask()
    except openai.OpenAIError as error:
        return error
    return None


@pytest.mark.slow
def test_a_stream_cut_by_the_server_raises(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(model="demo", messages=USER, stream=True, **LONG)
        next(stream)
        server.process.terminate()
        with pytest.raises(openai.APIError, match="shut down|stopping"):
            for _ in stream:
                pass
    server.process.wait(15)
