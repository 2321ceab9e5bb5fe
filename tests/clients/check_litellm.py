"""litellm, by its providers `openai` and `hosted_vllm`: completion, streaming, acompletion, text_completion, errors."""

import asyncio
import json
import os
from typing import Any

import harness

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched otherwise

import litellm

litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
COMMON: Any = {"api_base": f"{harness.URL}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0}
KEYS: Any = {name: COMMON[name] for name in ("api_base", "api_key")}
MODELS = ("openai/demo", "hosted_vllm/demo")


def answers() -> None:
    for model in MODELS:
        answer = litellm.completion(model=model, messages=MESSAGES, **COMMON)
        assert answer.choices[0].message.content
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 12)


def streams() -> None:
    for model in MODELS:
        whole = litellm.completion(model=model, messages=MESSAGES, **COMMON).choices[0].message.content
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(litellm.completion(model=model, messages=MESSAGES, **COMMON, **options))
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == whole
        assert chunks[-1].usage.completion_tokens == 12


def asynchronous() -> None:
    async def stream(model: str) -> str:
        chunks = await litellm.acompletion(model=model, messages=MESSAGES, stream=True, **COMMON)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def ask() -> list[str]:
        tasks = [litellm.acompletion(model=model, messages=MESSAGES, **COMMON) for model in MODELS * 4]
        answers = [answer.choices[0].message.content for answer in await asyncio.gather(*tasks)]
        return answers + await asyncio.gather(*map(stream, MODELS))

    assert len(set(asyncio.run(ask()))) == 1


def completions() -> None:
    texts = []
    for model in (*MODELS, "text-completion-openai/demo"):
        answer = litellm.text_completion(model=model, prompt="The old house stood", **COMMON)
        texts.append(answer.choices[0].text)
        chunks = litellm.text_completion(model=model, prompt="The old house stood", stream=True, **COMMON)
        texts.append("".join(chunk.choices[0].text or "" for chunk in chunks))
    assert len(set(texts)) == 1, texts


SCHEMA: Any = {
    "type": "object",
    "properties": {"place": {"enum": ["box", "bag"]}},
    "required": ["place"],
    "additionalProperties": False,
}


# As openai/ only: for hosted_vllm/ additionalProperties are taken out, and a model that can't stop adds more and more.
def tools() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    fields: Any = {**COMMON, "model": MODELS[0], "max_tokens": 100, "tools": [tool], "tool_choice": "required"}
    fields["parallel_tool_calls"] = False
    message = litellm.completion(messages=MESSAGES, **fields).choices[0].message
    (call,) = [json.loads(call.function.arguments) for call in message.tool_calls]
    assert call["place"] in ("box", "bag")
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **fields))
    whole = litellm.stream_chunk_builder(chunks).choices[0].message
    assert [json.loads(call.function.arguments) for call in whole.tool_calls] == [call]


def structured_output() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sighting", "schema": SCHEMA, "strict": True}}
    fields: Any = {**COMMON, "max_tokens": 60, "response_format": form}
    answer = litellm.completion(model=MODELS[0], messages=MESSAGES, **fields)
    assert json.loads(answer.choices[0].message.content)["place"] in ("box", "bag")


def other_apis() -> None:
    answer = litellm.responses(model=MODELS[0], input="Tell me a story.", max_output_tokens=16, **KEYS)
    assert answer.output[0].content[0].text
    direct: Any = {"api_base": harness.URL, "api_key": "none"}
    message = litellm.completion(model="anthropic/demo", messages=MESSAGES, max_tokens=12, **direct)
    assert message.choices[0].message.content


def errors() -> None:
    def ask(**fields: Any) -> Any:
        options = {"messages": MESSAGES, "model": MODELS[0], **COMMON, "num_retries": 0, **fields}
        return lambda: litellm.completion(**options)

    long = [{"role": "user", "content": "word " * 1000}]
    harness.raised(litellm.ContextWindowExceededError, ask(messages=long))
    harness.raised(litellm.NotFoundError, ask(model="openai/other"))
    harness.raised(litellm.BadRequestError, ask(temperature=3))
    harness.raised(litellm.AuthenticationError, ask(api_base=f"{harness.NARROW_URL}/v1"))


if __name__ == "__main__":
    harness.run(answers, streams, asynchronous, completions, tools, structured_output, other_apis, errors)
