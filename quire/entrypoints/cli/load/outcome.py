"""The requests of a load test: sends each at its time, and notes when its tokens came and how it ended.

A chunk counts as one token in the times, whatever it carries; the number of tokens is the server's own word (`usage`)
where it gives one.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise

from tqdm import tqdm

from quire.entrypoints.cli.load.client import Client
from quire.entrypoints.cli.load.events import EventReader, error_words


@dataclass(slots=True)
class Outcome:
    """What became of a request. Times are in seconds of `time.perf_counter`."""

    arrival: float  # when it was due; it starts later where --max-concurrency holds it back
    start: float = 0.0
    end: float = 0.0
    token_times: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0  # by the server's count
    num_output_tokens: int = 0  # by the server's count, or else the chunks
    error: str | None = None  # the kind, such as "HTTP 400 context_length_exceeded"; None where all went well
    error_message: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.start

    @property
    def e2el(self) -> float:
        """Seconds to the end of the answer."""
        return self.end - self.start

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 where there is none."""
        rest = self.num_output_tokens - 1
        return (self.end - self.token_times[0]) / rest if rest > 0 else 0.0

    @property
    def itls(self) -> list[float]:
        """Seconds between one token's arrival and the next one's."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


async def send(client: Client, path: str, body: bytes, arrival: float) -> Outcome:
    """Post a request for a streamed answer and wait for its end; a failure is in the outcome."""
    outcome, reader = Outcome(arrival, time.perf_counter()), EventReader()

    def take(piece: bytes) -> None:
        now = time.perf_counter()
        for event in reader.feed(piece):
            outcome.token_times.extend(now for choice in event.choices or () if choice.is_token)
            if event.usage is not None:
                outcome.num_prompt_tokens = event.usage.prompt_tokens
                outcome.num_output_tokens = event.usage.completion_tokens

    try:
        status, answer = await client.post(path, body, take)
    except OSError as error:
        outcome.error, outcome.error_message = type(error).__name__, str(error)
    else:
        if status != 200:
            outcome.error_message, code = error_words(answer)
            outcome.error = f"HTTP {status} {code or ''}".strip()
        elif reader.failure is not None:
            outcome.error, outcome.error_message = reader.failure
        elif not (reader.ended and outcome.token_times):
            outcome.error, outcome.error_message = "no complete stream", "the answer ended without its last chunk"
    outcome.num_output_tokens = outcome.num_output_tokens or len(outcome.token_times)
    outcome.end = time.perf_counter()
    return outcome


async def send_all(
    client: Client, path: str, bodies: Sequence[bytes], arrivals: Sequence[float], limit: int | None
) -> tuple[list[Outcome], bool]:
    """Send every body at its time, `limit` at once, and wait; also says whether Ctrl-C ended it before."""
    gate = asyncio.Semaphore(limit or len(bodies))
    outcomes: list[Outcome] = []
    start = time.perf_counter()

    async def one(body: bytes, arrival: float) -> None:
        async with gate:
            outcomes.append(await send(client, path, body, arrival))
        bar.update()

    try:
        with closing(client), tqdm(total=len(bodies), desc="Requests", unit="req", disable=None) as bar:
            async with asyncio.TaskGroup() as group:
                for body, seconds in zip(bodies, arrivals, strict=True):
                    # In any case: thousands of connections made at one go take seconds that Ctrl-C has to wait for.
                    await asyncio.sleep(start + seconds - time.perf_counter())
                    group.create_task(one(body, start + seconds))
    except asyncio.CancelledError:
        return outcomes, True
    return sorted(outcomes, key=lambda outcome: outcome.arrival), False
