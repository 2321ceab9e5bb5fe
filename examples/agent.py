"""A tiny agent: a model calls tools in a loop until it is told to answer. Run: python examples/agent.py [BASE_URL]

Without a URL it serves the bundled model, which knows nothing of tools: a grammar has it call them all the same.
It asks by OpenAI's client: pip install openai.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

NUM_ROUNDS = 3
FUNCTIONS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": NUMBER, "b": NUMBER},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
    for name in FUNCTIONS
]


def run_agent(client: OpenAI, question: str) -> list[int]:
    """Let the model call tools for some rounds and answer then; returns what the tools gave."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    results: list[int] = []
    for number in range(NUM_ROUNDS + 1):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="required" if number < NUM_ROUNDS else "none",
            parallel_tool_calls=False,
            max_completion_tokens=60,
            seed=number,
        )
        message: Any = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            arguments = json.loads(call.function.arguments)
            results.append(FUNCTIONS[call.function.name](**arguments))
            print(f"{call.function.name}({arguments['a']}, {arguments['b']}) = {results[-1]}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(results[-1])})
        if not message.tool_calls:
            print(f"answer: {message.content}")
    return results


@contextmanager
def served_demo() -> Iterator[str]:
    """The URL of a server of the bundled model, which runs meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "quire", "serve", "demo", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    if len(sys.argv) > 1:
        run_agent(OpenAI(base_url=sys.argv[1], api_key="-"), "What is 6 times 7, plus 8?")
        return
    with served_demo() as url:
        run_agent(OpenAI(base_url=url, api_key="-"), "What is 6 times 7, plus 8?")


if __name__ == "__main__":
    main()
