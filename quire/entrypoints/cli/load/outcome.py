"""One request of a load test: sends it, and notes when its tokens came and how it ended.

A chunk counts as one token in the times, whatever it carries; the number of tokens is the server's own word (`usage`)
where it gives one. Must not know of other requests.
"""

import time
from dataclasses import dataclass, field
from itertools import pairwise

from quire.entrypoints.cli.load.client import Client
from quire.entrypoints.cli.load.events import Choice, EventReader, Usage, error_words


@dataclass(slots=True)
class Outcome:
    """What became of a request. Times are in seconds of `time.perf_counter`."""

    arrival: float  # when it was due; it starts later where --max-concurrency holds it back
    start: float = 0.0
    end: float = 0.0
    token_times: list[float] = field(default_factory=list)
    usage: Usage | None = None
    error: str | None = None  # the kind, such as "HTTP 400 context_length_exceeded"; None where all went well
    error_message: str = ""

    def fail(self, kind: str, message: str) -> None:
        """Note what went wrong."""
        self.error, self.error_message = kind, message

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, by the server's count."""
        return self.usage.prompt_tokens if self.usage is not None else 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer: the server's count, or else the chunks."""
        return self.usage.completion_tokens if self.usage is not None else len(self.token_times)

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

    def take(piece: bytes, now: float) -> None:
        for event in reader.feed(piece):
            for choice in event.choices or ():
                if _is_token(choice):
                    outcome.token_times.append(now)
            if event.usage is not None:
                outcome.usage = event.usage

    try:
        status, answer = await client.request("POST", path, body, take)
    except OSError as error:
        outcome.fail(type(error).__name__, str(error))
    else:
        if status != 200:
            message, code = error_words(answer)
            outcome.fail(f"HTTP {status} {code or ''}".strip(), message)
        elif reader.failure is not None:
            outcome.fail(*reader.failure)
        elif not (reader.ended and outcome.token_times):
            outcome.fail("no complete stream", "the answer ended without its last chunk")
    outcome.end = time.perf_counter()
    return outcome


def _is_token(choice: Choice) -> bool:
    """Whether a chunk stands for a token: not the mere role that some servers open with, nor a mere end."""
    role_only = choice.delta is not None and choice.delta.role is not None
    return bool(choice.piece) or (choice.finish_reason is None and not role_only)
