"""The ollama package: chat and generate, whole and streamed, tools, schemas, lists of models, errors; async too."""

import asyncio
import json
from typing import Any

import harness
import ollama

client = ollama.Client(host=harness.URL)
USER: Any = [{"role": "user", "content": "Tell me a story."}]
OPTIONS: Any = {"temperature": 0, "num_predict": 12}
SCHEMA: Any = {
    "type": "object",
    "properties": {"place": {"enum": ["box", "bag"]}},
    "required": ["place"],
    "additionalProperties": False,
}


def answers() -> None:
    whole = client.chat("demo", messages=USER, options=OPTIONS)
    assert (whole.done_reason, whole.eval_count, bool(whole.message.content)) == ("length", 12, True)
    assert (whole.total_duration or 0) >= (whole.eval_duration or 0) > 0
    text = client.generate("demo:latest", prompt="Once upon", raw=True, options=OPTIONS)
    assert (text.done, bool(text.response)) == (True, True)
    loaded = client.generate("demo")
    assert loaded.done_reason == "load"


def streams() -> None:
    whole = client.chat("demo", messages=USER, options=OPTIONS).message.content
    pieces = list(client.chat("demo", messages=USER, options=OPTIONS, stream=True))
    assert len(pieces) > 2
    assert "".join(piece.message.content or "" for piece in pieces) == whole
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    parts = client.generate("demo", prompt="Tell me a story.", options=OPTIONS, stream=True)
    assert "".join(part.response for part in parts) == whole


def many_at_once() -> None:
    async def ask() -> list[str]:
        others = ollama.AsyncClient(host=harness.URL)
        answers = await asyncio.gather(*(others.chat("demo", messages=USER, options=OPTIONS) for _ in range(16)))
        return [answer.message.content or "" for answer in answers]

    assert len(set(asyncio.run(ask()))) == 1


def leaving_ends_the_work() -> None:
    stream = client.chat("demo", messages=USER, options={"num_predict": -1}, stream=True)
    next(iter(stream))
    stream.close()
    harness.wait_idle()


def schemas() -> None:
    answer = client.chat("demo", messages=USER, format=SCHEMA, options={"temperature": 0})
    assert json.loads(answer.message.content or "")["place"] in ("box", "bag")
    answer = client.generate("demo", prompt="A box?", format=SCHEMA, options={"temperature": 0})
    assert json.loads(answer.response)["place"] in ("box", "bag")


def vectors() -> None:
    both = client.embed("demo", ["A cat.", "A dog."], dimensions=8)
    assert [len(one) for one in both.embeddings] == [8, 8]
    assert abs(sum(value**2 for value in both.embeddings[0]) - 1) < 1e-6
    assert len(client.embeddings("demo", "A cat.").embedding) == 256


def models() -> None:
    (model,) = client.list().models
    assert (model.model, model.details and model.details.family) == ("demo:latest", "llama")
    shown = client.show("demo")
    assert (shown.modelinfo or {})["llama.context_length"] == 512
    (running,) = client.ps().models
    assert running.model == "demo:latest"


def errors() -> None:
    for call, status, text in (
        (lambda: client.chat("other", messages=USER), 404, "does not exist"),
        (lambda: client.pull("demo"), 404, "quire pull"),
        (lambda: client.chat("demo", messages=USER, options={"temperature": -1}), 400, "options.temperature"),
    ):
        error = harness.raised(ollama.ResponseError, call)
        assert isinstance(error, ollama.ResponseError)
        assert (error.status_code, text in error.error) == (status, True), error.error


def tools_are_refused_where_the_model_has_no_format() -> None:
    """The demo's template has none, and Ollama's API can't ask for a call that a grammar would hold."""
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    error = harness.raised(ollama.ResponseError, lambda: client.chat("demo", messages=USER, tools=[tool]))
    assert "tools" in str(error)


harness.run(
    answers,
    streams,
    many_at_once,
    leaving_ends_the_work,
    schemas,
    vectors,
    models,
    errors,
    tools_are_refused_where_the_model_has_no_format,
)
