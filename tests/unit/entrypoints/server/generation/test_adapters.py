"""Requests for adapters, whose names may be taken back while a request is read."""

import asyncio
from typing import Any

import pytest

from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.completion_request import CompletionRequest
from quire.entrypoints.server.dialects.chat import read_chat
from quire.entrypoints.server.dialects.completions import read_completion
from quire.lora.request import LoRARequest

BODIES: list[tuple[Any, Any]] = [
    (read_completion, CompletionRequest(model="voice", prompt=["Once", "Twice"])),
    (read_chat, ChatCompletionRequest(model="voice", messages=[{"role": "user", "content": "Hi"}])),
]


@pytest.mark.parametrize(("read", "body"), BODIES, ids=["completion", "chat"])
def test_an_adapter_that_is_unloaded_meanwhile_is_still_the_request_s(server: Any, read: Any, body: Any) -> None:
    adapter = server.state.adapters["voice"] = LoRARequest("voice", 1, "/voice")

    async def unloaded() -> Any:
        reading = asyncio.create_task(read(server.state, body, "id"))
        await asyncio.sleep(0)
        assert not reading.done()
        del server.state.adapters["voice"]
        return (await reading)[0].lora_request

    assert asyncio.run(unloaded()) is adapter
