"""AsyncInputs: whatever others send, a short chat goes its own way. Told by the order of events, not by clocks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from loras import DEMO, factors, write_adapter

from quire import EngineArgs
from quire.engine import adapters
from quire.engine.async_inputs import AsyncInputs
from quire.errors import InvalidRequestError
from quire.lora.request import LoRARequest
from quire.sampling_params import SamplingParams
from quire.text.configured import config_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]
CONFIG = EngineArgs(model="demo").resolve()
WORDS = "word " * 50_000


class Held:
    """An `encode` that does not return from long texts until it is let go."""

    def __init__(self, encode: Callable[..., list[int]]) -> None:
        self._encode = encode
        self.go_on = threading.Event()
        self.num_begun = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) >= len(WORDS):
            self.num_begun += 1
            assert self.go_on.wait(60)
            text = text[:100]
        return self._encode(text, add_special_tokens)


@asynccontextmanager
async def inputs(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[AsyncInputs, Held]]:
    tokenizer = config_tokenizer(CONFIG)
    assert tokenizer is not None
    held = Held(tokenizer.encode)
    monkeypatch.setattr(tokenizer, "encode", held)
    made = AsyncInputs(CONFIG, tokenizer)
    try:
        yield made, held
    finally:
        held.go_on.set()
        made.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def test_long_encodings_hold_up_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with inputs(monkeypatch) as (made, held):
            long = [asyncio.create_task(made.token_ids(WORDS)) for _ in range(4)]
            await asyncio.sleep(0)
            text = await made.render_chat(MESSAGES)
            assert await made.token_ids(text, add_special_tokens=False)
            assert len(await made.token_ids("word " * 1000)) > 1000, "of a middling length: there are threads for it"
            assert not any(task.done() for task in long)
            assert held.num_begun <= 1, "they wait for one another"
            held.go_on.set()
            assert all(await asyncio.gather(*long))

    run(main())


def test_bad_words_are_encoded_once_for_all_prompts_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        tokenizer = config_tokenizer(CONFIG)
        assert tokenizer is not None
        encode, encoding = tokenizer.encode, list[int]()

        def noted(text: str, add_special_tokens: bool) -> list[int]:
            if len(text) > 1:
                encoding.append(threading.get_ident())
            return encode(text, add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", noted)
        made = AsyncInputs(CONFIG, tokenizer)
        try:
            params = SamplingParams(bad_words=[f"{number} word" * 100 for number in range(100)])
            prompts = [await made.prepare("a", params.clone()) for _ in range(5)]
            requests = [made.processor.process("x", prompt, None, None, 0.0).request for prompt in prompts]
        finally:
            made.close()
        assert (len(encoding), threading.get_ident() in encoding) == (200, False)
        words = [request.task.bad_words_token_ids for request in requests]
        assert len(words[0]) == 200
        assert words == [words[0]] * 5

    run(main())


def test_long_conversations_hold_up_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with inputs(monkeypatch) as (made, _):
            order: list[str] = []

            async def render(name: str, size: int) -> None:
                await made.render_chat([{"role": "user", "content": "x" * size}])
                order.append(name)

            await asyncio.gather(render("short", 2), render("long", 1_000_000))  # starts a process for each
            order.clear()
            await asyncio.gather(*(render("long", 4_000_000) for _ in range(8)), render("short", 2))
            assert order.index("short") < 8

    run(main())


def test_endless_templates_of_strangers_hold_up_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

    async def main() -> None:
        async with inputs(monkeypatch) as (made, _):
            strangers = [
                asyncio.create_task(made.render_chat(MESSAGES, chat_template=endless + str(i))) for i in range(6)
            ]
            await asyncio.sleep(0)
            assert "Hi" in await made.render_chat(MESSAGES)
            assert await made.render_chat(MESSAGES, chat_template="the operator's", trusted=True) == "the operator's"
            assert not any(task.done() for task in strangers)
            for task in strangers:
                task.cancel()
            results = await asyncio.gather(*strangers, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)

    run(main())


def test_closing_ends_what_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

    async def main() -> None:
        async with inputs(monkeypatch) as (made, _):
            assert await made.render_chat(MESSAGES, chat_template="a") == "a"
            task = asyncio.create_task(made.render_chat(MESSAGES, chat_template=endless))
            await asyncio.sleep(0.01)
            made.close()
            with pytest.raises((InvalidRequestError, asyncio.CancelledError)):
                await task

    run(main())


def test_adapters_that_are_read_hold_up_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither who names one that is known, on the event loop, nor a prompt that is encoded in a thread."""
    paths = [write_adapter(tmp_path / str(own), factors(DEMO, 4, own), 4) for own in range(1, 6)]
    loras = [LoRARequest(f"voice-{own}", own, str(path)) for own, path in enumerate(paths, 1)]
    read, go_on = adapters.read_adapter, threading.Event()

    def held(path: str, name: str, *limits: int) -> Any:
        assert name == "voice-1" or go_on.wait(60)
        return read(path, name, *limits)

    monkeypatch.setattr(adapters, "read_adapter", held)
    config = EngineArgs(model="demo", enable_lora=True).resolve()

    async def main() -> None:
        made = AsyncInputs(config, config_tokenizer(config))
        try:
            known = await made.find_adapter(loras[0])
            reading = [asyncio.create_task(made.find_adapter(lora)) for lora in loras[1:]]
            assert len(await made.token_ids("word " * 1000)) > 100
            threading.Timer(5, go_on.set).start()  # where the event loop waited for them, it would now go on
            assert await made.find_adapter(loras[0]) is known
            assert not go_on.is_set()
            go_on.set()
            assert [ref.name for ref in await asyncio.gather(*reading) if ref] == [lora.lora_name for lora in loras[1:]]
        finally:
            go_on.set()
            made.close()

    run(main())
