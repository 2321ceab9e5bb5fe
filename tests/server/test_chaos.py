"""All that operators may do to a server, at any time, beside clients that ask and clients that leave.

Nothing hangs, nothing is an internal error, equal questions get equal answers however the server is changed meanwhile,
and in the end it is free. QUIRE_NIGHTLY=1 does it for longer, and to servers of several kinds.
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client import Answer, Connection, ask, run
from serving import RunningServer

import quire

SECONDS = 60.0 if os.environ.get("QUIRE_NIGHTLY") == "1" else 6.0
PATIENCE = 60.0  # of one request
ADAPTERS = Path(quire.__file__).parent / "demo" / "adapters"
NAMES = ["play", "sea", "talk"]
PROMPTS = [f"The {a} {b} " * count for a in ("old", "new") for b in ("king", "sea") for count in (1, 9)]
WANTED = {"/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/pause"}
MODES = ["abort", "wait", "keep"]
KEY = {"Authorization": "Bearer sesame"}
FLAGS = [
    "--api-key",
    "sesame",
    "--enable-lora",
    "--max-loras",
    "2",
    "--enable-prompt-adapter",
    "--allowed-adapter-dir",
    str(ADAPTERS),
]
FEW_BLOCKS = ["--num-kv-blocks", "60", "--max-model-len", "512"]
KINDS = {
    "plain": [],
    "engines": ["--data-parallel-size", "2"],
    "ranks": ["--tensor-parallel-size", "2", "--swap-space", "0.01", *FEW_BLOCKS],
    "drafts": ["--speculative-config.method", "suffix", "--scheduling-policy", "fair", *FEW_BLOCKS],
}
pytestmark = pytest.mark.slow


class Chaos:
    """Clients and operators of one server, who do what the dice say."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.seed, self.end = port, seed, time.monotonic() + SECONDS
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.texts: dict[tuple[str, str], str] = {}  # by model and prompt, the longest

    async def ask(self, path: str, fields: Any = None, method: str = "POST") -> Answer:
        async with asyncio.timeout(PATIENCE):  # wait_for takes a result that comes with a cancellation for all there is
            answer = await ask(self.port, method, path, fields, KEY)
        self.statuses[path.partition("?")[0], answer.status] += 1
        assert answer.status < 500 or answer.status == 503, (path, fields, answer)
        assert b"internal error" not in answer.body, (path, fields, answer)
        return answer

    async def question(self, rng: random.Random) -> None:
        model, prompt = rng.choice(["demo", *NAMES]), rng.choice(PROMPTS)
        fields = {"model": model, "prompt": prompt, "max_tokens": rng.choice([1, 8, 40]), "temperature": 0}
        stream = rng.random() < 0.5
        answer = await self.ask("/v1/completions", fields | {"ignore_eos": True, "stream": stream})
        if answer.status == 200 and not stream:
            text = answer.json()["choices"][0]["text"]
            known = self.texts.setdefault((model, prompt), text)
            assert text.startswith(known) or known.startswith(text), (model, prompt)
            self.texts[model, prompt] = max(text, known, key=len)

    async def departure(self, rng: random.Random) -> None:
        connection = await Connection.open(self.port)
        prompts, model = rng.choice([PROMPTS, PROMPTS[0]]), rng.choice(["demo", *NAMES])
        fields = {"model": model, "prompt": prompts, "max_tokens": 200, "stream": True, "n": rng.choice([1, 3])}
        connection.send("POST", "/v1/completions", fields, KEY)
        await asyncio.sleep(rng.random() * 0.1)
        with contextlib.suppress(ConnectionError):
            rng.choice([connection.close, connection.reset])()

    async def change(self, rng: random.Random) -> None:
        name, prefix = rng.choice(NAMES), rng.choice("ab")
        await rng.choice(
            [
                lambda: self.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(ADAPTERS / name)}),
                lambda: self.ask("/v1/unload_lora_adapter", {"lora_name": name}),
                lambda: self.ask("/reset_prefix_cache"),
                lambda: self.ask(f"/sleep?level={rng.choice([1, 2])}&mode={rng.choice(MODES)}"),
                lambda: self.ask("/wake_up"),
                lambda: self.ask(f"/pause?mode={rng.choice(MODES)}&clear_cache={rng.choice([0, 1])}"),
                lambda: self.ask("/resume"),
                lambda: self.ask("/admin/prefixes", {"prompt": rng.choice(PROMPTS) * 6, "name": prefix}),
                lambda: self.ask(f"/admin/prefixes/{prefix}", method="DELETE"),
                lambda: self.ask("/v1/embeddings", {"model": "demo", "input": rng.choice(PROMPTS)}),
                lambda: self.ask("/v1/responses", {"model": "demo", "input": "Hi", "background": rng.random() < 0.5}),
                lambda: self.ask(rng.choice(["/metrics", "/v1/models", "/health", "/load"]), method="GET"),
                lambda: self.ask("/v1/completions", b"{"),
            ]
        )()

    @property
    def has_done_all(self) -> bool:
        """Whether all that is to have happened has worked once."""
        return {path for path, status in self.statuses if status == 200} >= WANTED

    async def one(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while time.monotonic() < self.end or not self.has_done_all:  # which a slow machine takes longer for
            await rng.choices([self.question, self.departure, self.change], [6, 2, 3])[0](rng)

    async def relief(self) -> None:
        """Nobody waits for ever: what sleeps is woken up now and then, and what is paused goes on."""
        while True:  # also once no more is asked, as a slow machine may pause it late
            await asyncio.sleep(0.7)
            await self.ask("/resume")
            await self.ask("/wake_up")

    async def all(self) -> None:
        async with asyncio.TaskGroup() as group:
            relief = group.create_task(self.relief())
            async with asyncio.TaskGroup() as others:
                for number in range(16):
                    others.create_task(self.one(number))
            relief.cancel()
        await self.ask("/resume")
        await self.ask("/wake_up")
        for name in "ab":
            await self.ask(f"/admin/prefixes/{name}", method="DELETE")


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(k, marks=pytest.mark.nightly) for k in KINDS if k != "plain")]
)
def test_whatever_operators_do(start_server: Callable[..., RunningServer], kind: str) -> None:
    server = start_server(*FLAGS, *KINDS[kind])
    chaos = Chaos(server.port, seed=1)
    run(chaos.all(), SECONDS + 3 * PATIENCE)
    assert chaos.has_done_all
    server.wait_idle(30)
    server.stop()  # which looks at its log
