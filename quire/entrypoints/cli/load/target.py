"""The server under load: what it is called, what prompts it takes, and sending it requests at their times.

`quire bench serve` asks it before the clock starts. Any OpenAI-compatible server will do: what only some of them tell
(the size of the vocabulary, the longest context) is used where it is told.
"""

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from quire.entrypoints.cli.load.client import Address, Client
from quire.entrypoints.cli.load.options import LoadArgs
from quire.entrypoints.cli.load.outcome import Outcome, send
from quire.entrypoints.cli.load.workload import Vocabulary
from quire.entrypoints.cli.remote import RemoteError, ask, headers, list_models
from quire.errors import ConfigError, QuireError

_CALIBRATION_WORDS = (16, 144)


class Target:
    """The server under load, and what is known of it."""

    def __init__(self, args: LoadArgs) -> None:
        self._url = args.base_url or f"http://{args.host}:{args.port}"
        address = Address.parse(self._url)
        self._chat = args.backend == "openai-chat"
        endpoint = args.endpoint or ("/v1/chat/completions" if self._chat else "/v1/completions")
        self._root = address.path.removesuffix("/v1")
        self.path = f"{self._root}/{endpoint.lstrip('/')}"
        self.client = Client(address, headers(args.api_key) | args.headers)
        self.model = args.model or ""
        self.max_model_len: int | None = None
        self._patience = args.ready_check_timeout_sec
        ignore_eos = args.dataset_name != "custom" if args.ignore_eos is None else args.ignore_eos
        temperature = {} if args.temperature is None else {"temperature": args.temperature}
        self._fields = temperature | ({"ignore_eos": True} if ignore_eos else {}) | (args.extra_body or {})

    def body(self, prompt: str | list[int], max_tokens: int, *, stream: bool = True) -> bytes:
        """A request's body."""
        question = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        if self._chat and not isinstance(prompt, str):
            raise ConfigError("--backend openai-chat takes prompts of text, not of token ids.")
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        fields = {"model": self.model, **question, "max_tokens": max_tokens, **streaming, **self._fields}
        return msgspec.json.encode(fields)

    async def find_model(self) -> None:
        """Ask for the model's name, where none is given, and the longest context; both wait until the server answers.

        Raises:
            RemoteError: no server answers, or it names no model.
        """
        deadline = time.perf_counter() + self._patience
        while True:
            try:
                cards = await list_models(self.client, self._url, f"{self._root}/v1")
                break
            except RemoteError:
                if time.perf_counter() > deadline:
                    if self.model:
                        return
                    raise
            await asyncio.sleep(0.2)
        self.model = self.model or cards[0]["id"]
        length = next((card.get("max_model_len") for card in cards if card["id"] == self.model), None)
        self.max_model_len = length if isinstance(length, int) else None

    async def find_vocabulary(self) -> Vocabulary:
        """What prompts can be made of: token ids where the server says how many there are, else words."""
        if not self._chat:
            with suppress(QuireError):
                size = _field(await ask(self.client, self._url, "GET", f"{self._root}/tokenizer_info"), "vocab_size")
                if isinstance(size, int) and size > 0:
                    return Vocabulary(size, as_text=False)
        words, counts = Vocabulary(), []
        for num_words in _CALIBRATION_WORDS:
            body = self.body(words.render(words.draw(random.Random(0), num_words)), 1, stream=False)
            usage = _field(await ask(self.client, self._url, "POST", self.path, body), "usage")
            counts.append(usage.get("prompt_tokens", 0) if isinstance(usage, dict) else 0)
        tokens_per_word = (counts[1] - counts[0]) / (_CALIBRATION_WORDS[1] - _CALIBRATION_WORDS[0])
        if tokens_per_word <= 0:  # it counts no tokens: a word is one
            return words
        overhead = max(0.0, counts[0] - _CALIBRATION_WORDS[0] * tokens_per_word)
        return Vocabulary(per_token=1 / tokens_per_word, overhead=overhead)


async def drive(
    target: Target, bodies: Sequence[bytes], arrivals: Iterable[float], limit: int | None, progress: Any
) -> tuple[list[Outcome], bool]:
    """Send every body at its time, and wait for the answers; also says whether Ctrl-C ended it before."""
    gate = asyncio.Semaphore(limit or len(bodies))
    outcomes: list[Outcome] = []
    start = time.perf_counter()

    async def one(body: bytes, arrival: float) -> None:
        async with gate:
            outcomes.append(await send(target.client, target.path, body, arrival))
        progress.update()

    try:
        async with asyncio.TaskGroup() as group:
            for body, seconds in zip(bodies, arrivals, strict=True):
                if (delay := start + seconds - time.perf_counter()) > 0:
                    await asyncio.sleep(delay)
                group.create_task(one(body, start + seconds))
    except asyncio.CancelledError:
        return outcomes, True
    return sorted(outcomes, key=lambda outcome: outcome.arrival), False


def _field(answer: bytes, name: str) -> Any:
    """A field of a JSON object; None where it is no such thing."""
    try:
        value = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return None
    return value.get(name) if isinstance(value, dict) else None
