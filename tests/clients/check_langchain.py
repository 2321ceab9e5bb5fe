"""langchain-openai: chat and completion models, called, streamed, in batches, asynchronously; tools, schemas."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

import harness
import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

PROMPT = "Tell me a story."
COMMON: Any = {"base_url": f"{harness.URL}/v1", "api_key": "none", "model": "demo", "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(max_tokens=12, stream_usage=True, **COMMON)  # sent as max_completion_tokens
completions = OpenAI(max_tokens=12, **COMMON)
runner = asyncio.Runner()  # one event loop for all: langchain keeps its connections


def wait(work: Coroutine[Any, Any, Any]) -> Any:
    return runner.run(work)


def chat_answers() -> None:
    answer = chat.invoke(PROMPT)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == "demo"
    assert wait(chat.ainvoke(PROMPT)).content == answer.content


def chat_streams() -> None:
    whole = chat.invoke(PROMPT)
    total = None
    for chunk in chat.stream(PROMPT):
        total = chunk if total is None else total + chunk
    assert total.content == whole.content
    assert total.usage_metadata == whole.usage_metadata
    assert total.response_metadata["finish_reason"] == "length"

    async def stream() -> str:
        return "".join([chunk.content async for chunk in chat.astream(PROMPT)])

    assert wait(stream()) == whole.content


def chat_batches() -> None:
    prompts = [f"{PROMPT} {number}" for number in range(6)]
    alone = [chat.invoke(prompt).content for prompt in prompts]
    assert [answer.content for answer in chat.batch(prompts)] == alone
    assert [answer.content for answer in wait(chat.abatch(prompts))] == alone


def conversations_and_parameters() -> None:
    model = ChatOpenAI(
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=2,
        stop=["never said"],
        seed=7,
        top_p=0.9,
        presence_penalty=0.1,
        extra_body={"top_k": 20, "repetition_penalty": 1.1, "min_p": 0.01},
        **{**COMMON, "temperature": 0.7},
    )
    parts: Any = [{"type": "text", "text": "And then?"}]
    messages = [SystemMessage("Be brief."), HumanMessage(PROMPT), AIMessage("No."), HumanMessage(parts)]
    first, second = model.invoke(messages), model.invoke(messages)
    assert first.content == second.content, "a seed repeats"
    tokens = first.response_metadata["logprobs"]["content"]
    assert len(tokens) == first.usage_metadata["output_tokens"] <= 9
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


def completion_model() -> None:
    text = completions.invoke(PROMPT)
    assert text
    assert "".join(completions.stream(PROMPT)) == text
    assert completions.batch([PROMPT, "The old house"]) == [text, completions.invoke("The old house")]
    result = completions.generate([PROMPT, "The old house"])  # both in one request
    assert [generation[0].text for generation in result.generations][0] == text
    assert result.llm_output["token_usage"]["completion_tokens"] == 24


class Sighting(BaseModel):
    """Where the cat is."""

    model_config = ConfigDict(extra="forbid")  # or else a model that can't stop adds more and more
    place: Literal["box", "bag"]


@tool(args_schema=Sighting)
def look(place: str) -> str:
    """Look into something."""
    return f"a cat in the {place}"


def tools() -> None:
    model = ChatOpenAI(max_tokens=100, **COMMON)
    bound = model.bind_tools([look], tool_choice="look", strict=True)
    answer = bound.invoke(PROMPT)
    (call,) = answer.tool_calls
    assert call["args"]["place"] in ("box", "bag")
    total = None
    for chunk in bound.stream(PROMPT):
        total = chunk if total is None else total + chunk
    assert [made["args"] for made in total.tool_calls] == [call["args"]]
    result = look.invoke(call)
    assert model.bind_tools([look], tool_choice="none").invoke([HumanMessage(PROMPT), answer, result]).content


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        model = ChatOpenAI(max_tokens=100, **COMMON).with_structured_output(Sighting, method=method)
        assert model.invoke(PROMPT).place in ("box", "bag"), method


def responses() -> None:
    model = ChatOpenAI(max_tokens=16, use_responses_api=True, **COMMON)
    answer = model.invoke(PROMPT)
    assert answer.text
    assert "".join(chunk.text for chunk in model.stream(PROMPT)) == answer.text


def errors() -> None:
    error = harness.raised(openai.BadRequestError, lambda: chat.invoke("word " * 1000))
    assert "maximum context length" in str(error)
    harness.raised(openai.NotFoundError, lambda: ChatOpenAI(**{**COMMON, "model": "other"}).invoke(PROMPT))


if __name__ == "__main__":
    answers = (chat_answers, chat_streams, chat_batches, conversations_and_parameters, completion_model)
    harness.run(*answers, tools, structured_output, responses, errors)
