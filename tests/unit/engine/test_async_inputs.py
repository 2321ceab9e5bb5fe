"""AsyncInputs: whatever others send, a short chat goes its own way. Told by the order of events, not by clocks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire import EngineArgs
from quire.engine.async_inputs import AsyncInputs
from quire.engine.tokenizer import config_tokenizer
from quire.errors import InvalidRequestError

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
