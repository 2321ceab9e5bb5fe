"""A stream says what the whole answer says, of requests that the dice make: many at a time, on a server of few blocks.

QUIRE_NIGHTLY=1 asks more of them, and servers of several kinds.
"""

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from client import Answer, ask, events, run
from dice import CITY, STOPS, words
from serving import RunningServer

COUNT = 2000 if os.environ.get("QUIRE_NIGHTLY") == "1" else 250
AT_ONCE = 12
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CALLS = ["auto", "required", "none", {"type": "function", "function": {"name": "weather"}}]
STRUCTURES: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": r"[a-z ]{3,20}\."}},
    {"structured_outputs": {"choice": ["alpha", "beta é", "中文"]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}},
]
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
FEW_BLOCKS = ["--num-kv-blocks", "40", "--max-model-len", "256", *TOOLS]
KINDS = {
    "drafts": ["--speculative-config.method", "suffix", "--reasoning-parser", "qwen3", *FEW_BLOCKS],
    "plain": TOOLS,
    "swap": ["--swap-space", "0.01", "--scheduling-policy", "fair", "--stream-interval", "3", *FEW_BLOCKS],
    "ranks": ["--tensor-parallel-size", "2", *FEW_BLOCKS],
}
pytestmark = pytest.mark.slow


def body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path, and what is asked there."""
    drawn = {"temperature": rng.choice([0.3, 0.9, 1.5, 2.0]), "seed": rng.randrange(2**31)}
    fields: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 7, 20, 45, 90])}
    fields |= {"temperature": 0} if rng.random() < 0.4 else drawn
    further = {
        "top_p": 0.8,
        "min_p": 0.02,
        "presence_penalty": rng.uniform(-2, 2),
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "stop": rng.sample(STOPS, rng.randint(1, 3)),
        "include_stop_str_in_output": True,
        "min_tokens": 1,
        "skip_special_tokens": False,
        "logit_bias": {str(rng.randrange(4096)): rng.uniform(-50, 20) for _ in range(4)},
        "stop_token_ids": [rng.randrange(4096) for _ in range(8)],
        "return_token_ids": True,
    }
    fields |= {name: value for name, value in further.items() if rng.random() < 0.2}
    if fields["temperature"] and rng.random() < 0.3:
        fields["n"] = rng.choice([2, 3])
    if rng.random() < 0.1:
        fields |= rng.choice(STRUCTURES)
    if rng.random() < 0.5:
        ids = [rng.randrange(3, 4096) for _ in range(rng.randint(1, 40))]
        fields["prompt"] = rng.choice([words(rng, rng.randint(1, 30)), [words(rng, 3), words(rng, 9)], ids])
        fields |= {"logprobs": rng.choice([0, 1, 5])} if rng.random() < 0.4 else {}
        fields |= {"echo": True} if rng.random() < 0.2 else {}
        return "/v1/completions", fields
    fields["messages"] = [{"role": "user", "content": words(rng, rng.randint(1, 20))}]
    fields |= {"logprobs": True, "top_logprobs": rng.choice([0, 1, 5])} if rng.random() < 0.4 else {}
    if rng.random() < 0.4:
        fields |= {"tools": [WEATHER], "tool_choice": rng.choice(CALLS), "max_tokens": rng.choice([20, 90, 150])}
    return "/v1/chat/completions", fields


def told(choice: dict[str, Any]) -> dict[str, Any]:
    """What a choice, or a piece of one, says: texts, calls and lists, to be joined, and why it ended."""
    said = choice.get("message") or choice.get("delta") or choice
    calls = {place: one["function"] for place, one in enumerate(said.get("tool_calls") or ())}
    if "delta" in choice:
        calls = {one["index"]: one.get("function") or {} for one in said.get("tool_calls") or ()}
    logprobs = choice.get("logprobs") or {}
    return {
        "text": (said.get("text") or "") + (said.get("content") or ""),
        "reasoning": said.get("reasoning_content") or "",
        "token_ids": choice.get("token_ids") or [],
        "ends": [(choice["finish_reason"], choice.get("stop_reason"))] if choice.get("finish_reason") else [],
        **{f"logprobs {name}": value for name, value in logprobs.items() if value},
        **{f"call {place} {name}": value for place, one in calls.items() for name, value in one.items() if value},
    }


def joined(answers: list[Any]) -> dict[int, dict[str, Any]]:
    """The choices of one answer, or of a stream's pieces."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for answer in answers for choice in answer["choices"]):
        known = found.setdefault(choice["index"], {})
        for name, value in told(choice).items():
            known[name] = known[name] + value if name in known else value
    return found


def usage(answers: list[Any]) -> dict[str, Any]:
    """What it took; what of it was cached depends on what came before."""
    return {name: value for name, value in answers[-1]["usage"].items() if name != "prompt_tokens_details"}


async def compare(port: int, number: int, room: asyncio.Semaphore) -> int:
    """Ask twice; the status of both."""
    path, fields = body(random.Random(number))
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    answers: list[Answer] = []
    for further in ({}, streamed):
        async with room:
            answers.append(await ask(port, "POST", path, fields | further))
    whole, stream = answers
    assert stream.status == whole.status, (number, fields, whole.body, stream.body)
    if whole.status != 200:
        assert (whole.status, stream.json()) == (400, whole.json()), (number, fields)
        return whole.status
    *pieces, done = events(stream.body)
    assert done == "[DONE]"
    assert not [piece for piece in pieces if "error" in piece], (number, fields)
    assert joined(pieces) == joined([whole.json()]), (number, fields)
    assert usage(pieces) == usage([whole.json()]), (number, fields)
    return 200


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "drafts" else pytest.mark.nightly) for k in KINDS])
def test_streams_and_whole_answers_agree(start_server: Callable[..., RunningServer], kind: str) -> None:
    server = start_server(*KINDS[kind])

    async def all_of_them() -> list[int]:
        room = asyncio.Semaphore(AT_ONCE)
        return await asyncio.gather(*[compare(server.port, number, room) for number in range(COUNT)])

    statuses = run(all_of_them(), 60 + COUNT)
    assert statuses.count(200) > 0.9 * COUNT
    server.wait_idle()
    server.stop()
