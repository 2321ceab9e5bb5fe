"""The figures that RELIABILITY.md promises to hold under load, each against a real server.

CI runs a short form of each; QUIRE_NIGHTLY=1 adds the form that the page names. Counts, contents and bounded memory
decide; times do so where the page gives a bar, and in CI with much room. `pytest -s` shows what was measured.
"""

import asyncio
import contextlib
import itertools
import os
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from client import Connection, Footprint, ask, events, run, until_idle
from serving import RunningServer

NIGHTLY = os.environ.get("QUIRE_NIGHTLY") == "1"
SOAK_SECONDS = float(os.environ.get("QUIRE_SOAK_SECONDS", "600"))  # 3600 for the bar of 1% an hour
pytestmark = pytest.mark.slow

CONTEXT = 512  # tokens, of the demo model
Starter = Callable[..., RunningServer]


def report(**figures: float) -> None:
    print("\n  " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))


def body(prompt: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A completion's request that is greedy and goes on to its last token."""
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **fields}


def endless(**fields: Any) -> dict[str, Any]:
    """A request to the end of the context."""
    return body([5] * 4, CONTEXT - 4, **fields)


# Clients that leave.


def test_cancel_storm_leaves_the_engine_free(server: RunningServer) -> None:
    golden = server.golden()

    async def impatient(stream: bool) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await ask(server.port, "POST", "/v1/completions", endless(n=2, temperature=1, stream=stream))

    async def storm() -> tuple[float, float]:
        await asyncio.gather(*[impatient(stream=number % 2 == 0) for number in range(200)])
        start = time.monotonic()
        answer = await ask(server.port, "POST", "/v1/completions", body("Next", 8))
        seconds = time.monotonic() - start
        assert answer.status == 200
        return seconds, await until_idle(server.port)

    next_answer, all_free = run(storm(), 60)
    report(next_answer=next_answer, all_free=all_free)
    assert next_answer < 5
    assert all_free < (2 if NIGHTLY else 10)
    assert server.golden() == golden
    server.wait_idle()


# Everything at once.

BAD: list[tuple[int, Any]] = [  # status, body
    (400, b"{"),
    (400, []),
    (400, {"prompt": []}),
    (400, {"prompt": [4096]}),
    (400, {"prompt": "a", "temperature": 3}),
    (400, {"prompt": "a", "n": 0}),
    (400, {"prompt": [7] * CONTEXT}),
    (400, {"prompt": "a", "max_tokens": CONTEXT}),
    (404, {"prompt": "a", "model": "none"}),
]


@dataclass
class Mix:
    """A mixture of requests for one server, and what came of them."""

    server: RunningServer
    rng: random.Random
    abort_share: float = 0.1
    bad_share: float = 0.05
    statuses: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0  # by the usage of the requests that were answered in full
    num_prompt_tokens: int = 0
    num_sequences: int = 0  # likewise
    num_aborted: int = 0
    most_tokens_of_aborted: int = 0
    expected: dict[str, list[int]] = field(default_factory=dict)  # greedy tokens by prompt
    bad: Iterator[tuple[int, Any]] = field(default_factory=lambda: itertools.cycle(BAD))

    async def one(self) -> None:
        """One request of a random kind."""
        kind = self.rng.random()
        if kind < self.bad_share:
            await self._bad()
        elif kind < self.bad_share + self.abort_share:
            await self._aborted()
        elif kind < 0.6:
            await self._stream()
        elif kind < 0.8:
            await self._whole()
        else:
            await self._chat()

    def _greedy(self, prompt: str, token_ids: list[int]) -> None:
        """Equal prompts get equal tokens, whatever else is going on; the longest answer so far is the measure."""
        known = self.expected.setdefault(prompt, token_ids)
        assert token_ids[: len(known)] == known[: len(token_ids)], prompt
        if len(token_ids) > len(known):
            self.expected[prompt] = token_ids

    def _prompt(self) -> str:
        return f"The {self.rng.choice(['old', 'new', 'red'])} {self.rng.choice(['house', 'king', 'sea'])} "

    def _count(self, usage: dict[str, int], num_sequences: int) -> None:
        self.num_tokens += usage["completion_tokens"]
        self.num_prompt_tokens += usage["prompt_tokens"]
        self.num_sequences += num_sequences

    async def _post(self, path: str, fields: Any) -> Any:
        answer = await ask(self.server.port, "POST", path, fields)
        self.statuses[answer.status] += 1
        assert answer.status == 200, answer.body
        return answer

    async def _whole(self) -> None:
        prompts = [self._prompt() for _ in range(self.rng.randint(1, 3))]
        answer = await self._post("/v1/completions", body(prompts, self.rng.randint(1, 60), return_token_ids=True))
        result = answer.json()
        for prompt, choice in zip(prompts, result["choices"], strict=True):
            self._greedy(prompt, choice["token_ids"])
        assert sum(len(choice["token_ids"]) for choice in result["choices"]) == result["usage"]["completion_tokens"]
        self._count(result["usage"], len(prompts))

    async def _stream(self) -> None:
        prompt, n = self._prompt(), self.rng.choice([1, 1, 1, 3])
        options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "n": n}
        temperature = 0 if n == 1 else 1
        stop = self.rng.choice([[], ["the", "."]])
        fields = body(prompt, self.rng.randint(1, 60), **options, temperature=temperature, stop=stop)
        *chunks, last, done = events((await self._post("/v1/completions", fields)).body)
        assert done == "[DONE]"
        assert last["choices"] == []
        tokens: list[list[int]] = [[] for _ in range(n)]
        reasons: list[list[str]] = [[] for _ in range(n)]
        for choice in itertools.chain.from_iterable(chunk["choices"] for chunk in chunks):
            tokens[choice["index"]] += choice["token_ids"]
            reasons[choice["index"]] += filter(None, [choice["finish_reason"]])
        assert all(len(given) == 1 for given in reasons), "each choice ends exactly once"
        assert sum(map(len, tokens)) == last["usage"]["completion_tokens"]
        if n == 1:
            self._greedy(prompt, tokens[0])
        self._count(last["usage"], n)

    async def _chat(self) -> None:
        fields = {"messages": [{"role": "user", "content": self._prompt()}], "max_tokens": self.rng.randint(1, 60)}
        self._count((await self._post("/v1/chat/completions", fields)).json()["usage"], 1)

    async def _bad(self) -> None:
        status, fields = next(self.bad)
        answer = await ask(self.server.port, "POST", "/v1/completions", fields)
        self.statuses[answer.status] += 1
        assert answer.status == status, (fields, answer)
        assert answer.json()["error"]["message"]

    async def _aborted(self) -> None:
        """The client leaves after some chunks, by a reset or in order, or before there is any."""
        connection = await Connection.open(self.server.port)
        num_chunks, most = self.rng.choice([0, 1, 10]), 200
        connection.send("POST", "/v1/completions", body(self._prompt(), most, stream=True))
        self.num_aborted += 1
        self.most_tokens_of_aborted += most
        if num_chunks:
            status, headers = await connection.head()
            assert status == 200
            chunks = connection.chunks(headers)
            for _ in range(num_chunks):
                await anext(chunks, None)  # on a busy machine, a few hold all
            await chunks.aclose()
        self.rng.choice([connection.close, connection.reset])()


async def work_off(mix: Mix, num_requests: int, concurrency: int) -> None:
    numbers = iter(range(num_requests))

    async def worker() -> None:
        for _ in numbers:
            await mix.one()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())


@pytest.mark.parametrize("num_requests", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_mixed_load(start_server: Starter, num_requests: int) -> None:
    """No 5xx, exact token counts, equal answers to equal questions, and a smooth event loop."""
    server = start_server("--debug")
    golden = server.golden()
    before = server.metrics()
    mix, start = Mix(server, random.Random(0)), time.monotonic()
    run(work_off(mix, num_requests, concurrency=32), 60 + num_requests / 20)
    seconds = time.monotonic() - start
    run(until_idle(server.port), 30)
    server.wait_idle()
    after = server.metrics()
    gained = {name: after[name] - before.get(name, 0) for name in after}
    stall = after["quire:event_loop_max_stall_seconds"]
    report(requests_per_second=num_requests / seconds, stall=stall, **{str(k): v for k, v in mix.statuses.items()})
    assert set(mix.statuses) == {200, 400, 404}
    assert mix.num_aborted > num_requests / 20
    extra = gained["vllm:generation_tokens_total"] - mix.num_tokens
    assert 0 <= extra <= mix.most_tokens_of_aborted
    assert 0 <= gained["vllm:request_success_total"] - mix.num_sequences <= mix.num_aborted
    assert stall < (0.05 if num_requests == 10_000 else 2.0)
    assert server.golden() == golden


def test_token_counts_are_exact(server: RunningServer) -> None:
    """Where nobody leaves, usage, what was delivered and the counters of /metrics are one number."""
    before = server.metrics()
    mix = Mix(server, random.Random(1), abort_share=0.0)
    run(work_off(mix, 150, concurrency=16), 60)
    server.wait_idle()
    after = server.metrics()
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == mix.num_tokens
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == mix.num_prompt_tokens
    assert after["vllm:request_success_total"] - before["vllm:request_success_total"] == mix.num_sequences
    assert after["vllm:request_generation_tokens_sum"] - before["vllm:request_generation_tokens_sum"] == mix.num_tokens


# Readers that are slow.


@pytest.mark.parametrize(
    ("num_readers", "num_tokens"), [(60, 100), pytest.param(500, CONTEXT - 4, marks=pytest.mark.nightly, id="nightly")]
)
def test_slow_readers_hold_up_nobody(start_server: Starter, num_readers: int, num_tokens: int) -> None:
    """Streams read at a byte a second cost the server little memory, and nobody an answer; the time is reported."""
    server = start_server()

    async def one_latency() -> float:
        """Seconds of a whole stream for each of its tokens: on a busy machine, one chunk may bring all of them."""
        start = time.monotonic()
        answer = await ask(server.port, "POST", "/v1/completions", body("A fast reader", 80, stream=True))
        assert answer.status == 200
        return (time.monotonic() - start) / 80

    async def latency() -> float:
        return statistics.median([await one_latency() for _ in range(num_readers // 10)])

    async def slow(connection: Connection) -> None:
        while await connection.reader.read(1):
            await asyncio.sleep(1)

    async def scenario() -> tuple[float, float, int]:
        fields = body([5] * 4, num_tokens, stream=True, logprobs=20, stream_options={"include_usage": True})
        warm_up = (ask(server.port, "POST", "/v1/completions", fields) for _ in range(num_readers))
        await asyncio.gather(*warm_up)
        alone = await latency()
        resident = Footprint.of(server.processes()).resident_bytes
        connections = [await Connection.open(server.port, receive_buffer=2048) for _ in range(num_readers)]
        for connection in connections:
            connection.send("POST", "/v1/completions", fields)
        readers = [asyncio.create_task(slow(connection)) for connection in connections]
        await until_idle(server.port, 120)  # all is computed, and hardly any of it read
        beside = await latency()
        grown = Footprint.of(server.processes()).resident_bytes - resident
        for reader in readers:
            reader.cancel()
        # One of them makes haste now: nothing of its answer is missing.
        hasty, rest = connections[0], b""
        hasty.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        while not rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            rest = rest[-1000:] + await hasty.reader.read(100_000)
        assert f'"completion_tokens":{num_tokens}'.encode() in rest
        for connection in connections:
            connection.reset()
        return alone, beside, grown

    golden = server.golden()
    alone, beside, grown = run(scenario(), 240)
    mib_each = grown / 2**20 / num_readers
    report(alone_ms=alone * 1e3, beside_ms=beside * 1e3, ratio=beside / alone, mib_each=mib_each)
    assert mib_each < 1
    assert server.golden() == golden
    server.wait_idle()


# More than it can take.


def test_overload_is_refused_at_once(start_server: Starter) -> None:
    """Of four times the limit, the surplus gets 503 and Retry-After; what was accepted is answered in full."""
    running, queued = 4, 16
    server = start_server("--max-num-seqs", str(running), "--max-num-queued-reqs", str(queued))

    async def timed(number: int) -> tuple[float, Any]:
        start = time.monotonic()
        answer = await ask(server.port, "POST", "/v1/completions", endless(stream=number % 2 == 0))
        return time.monotonic() - start, answer

    async def scenario() -> list[tuple[float, Any]]:
        return await asyncio.gather(*[timed(number) for number in range(4 * (running + queued))])

    answers = run(scenario(), 120)
    refused = [(seconds, answer) for seconds, answer in answers if answer.status == 503]
    accepted = [answer for _, answer in answers if answer.status == 200]
    assert len(refused) + len(accepted) == len(answers)
    assert running + queued <= len(accepted) <= 2 * (running + queued)
    for _, answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"]
        assert str(queued) in answer.json()["error"]["message"]
    for answer in accepted:
        assert answer.body.endswith(b"data: [DONE]\n\n") or answer.json()["usage"]["completion_tokens"] == CONTEXT - 4
    slowest = max(seconds for seconds, _ in refused)
    report(accepted=len(accepted), refused=len(refused), slowest_refusal_ms=slowest * 1e3)
    # All came within a moment: it is the connections before it that the last one waits for.
    assert slowest < 5
    run(until_idle(server.port), 30)
    assert server.golden()[0]


def test_a_refusal_comes_in_50_ms(start_server: Starter) -> None:
    """One client at a time knocks at a full server."""
    server = start_server("--max-num-seqs", "1", "--max-num-queued-reqs", "1")

    async def scenario() -> list[float]:
        connections = [await Connection.open(server.port) for _ in range(2)]
        for connection in connections:
            connection.send("POST", "/v1/completions", endless(stream=True, n=16, temperature=1))
        await connections[0].head()
        times = []
        for _ in range(15):
            start = time.monotonic()
            answer = await ask(server.port, "POST", "/v1/completions", body("Me too", 1))
            times.append(time.monotonic() - start)
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
        for connection in connections:
            connection.close()
        return times

    times = run(scenario(), 60)
    report(median_ms=statistics.median(times) * 1e3, longest_ms=max(times) * 1e3)
    assert statistics.median(times) < (0.05 if NIGHTLY else 1.0)
    run(until_idle(server.port), 30)


def test_first_come_first_served(start_server: Starter) -> None:
    """With one place, requests are answered in the order in which they came; a higher priority goes first."""
    server = start_server("--max-num-seqs", "1", "--scheduling-policy", "priority")
    order: list[int] = []

    async def one(number: int, priority: int) -> None:
        answer = await ask(server.port, "POST", "/v1/completions", body(f"Number {number}", 60, priority=priority))
        assert answer.status == 200
        order.append(number)

    async def scenario() -> None:
        first = [asyncio.create_task(ask(server.port, "POST", "/v1/completions", endless())) for _ in range(6)]
        await asyncio.sleep(0.1)
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(one(number, priority=1 + number % 2))
                await asyncio.sleep(0.03)
        await asyncio.gather(*first)

    run(scenario(), 60)
    assert order == [0, 2, 4, 6, 1, 3, 5, 7]


# Too few blocks.


def test_preempted_requests_get_the_same_answers(server: RunningServer, start_server: Starter) -> None:
    """A KV cache too small for all: outputs and logprobs are those of a large one."""
    fields = [
        body([number + 10] * 20, 200, logprobs=2, return_token_ids=True, temperature=number % 2, seed=number)
        for number in range(8)
    ]

    def answers(of: RunningServer) -> list[Any]:
        async def all_at_once() -> list[Any]:
            asked = (ask(of.port, "POST", "/v1/completions", one) for one in fields)
            return [answer.json()["choices"] for answer in await asyncio.gather(*asked)]

        return run(all_at_once(), 60)

    tight = start_server("--num-kv-blocks", "20")  # of 32 tokens, for 8 sequences of 220
    assert answers(tight) == answers(server)
    num_preemptions = tight.metrics()["vllm:num_preemptions_total"]
    report(preemptions=num_preemptions)
    assert num_preemptions > 0
    run(until_idle(tight.port), 30)


# Over time.


@pytest.mark.parametrize("seconds", [4, pytest.param(SOAK_SECONDS, marks=pytest.mark.nightly, id="nightly")])
def test_soak_neither_grows_nor_leaks(start_server: Starter, seconds: float) -> None:
    """After a warm-up, memory, files and threads are flat under a steady mixture."""
    server = start_server("--num-kv-blocks", "256")  # few: each takes memory once it is first used
    mix = Mix(server, random.Random(2))

    async def scenario() -> list[tuple[float, Footprint]]:
        async def work() -> None:
            while True:
                await work_off(mix, 64, concurrency=8)

        samples: list[tuple[float, Footprint]] = []
        await work_off(mix, 128, concurrency=8)  # a warm-up of so much at least, however busy the machine is
        worker = asyncio.create_task(work())
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds * 1.3 and not worker.done():
            await asyncio.sleep(seconds / 100)
            if passed > seconds * 0.3:
                samples.append((passed, Footprint.of(server.processes())))
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker
        await until_idle(server.port)
        return samples

    samples = run(scenario(), seconds * 1.5 + 120)
    resident = [sample.resident_bytes for _, sample in samples]
    slope = statistics.linear_regression([passed for passed, _ in samples], resident).slope
    hourly = slope * 3600 / statistics.mean(resident)
    half = len(samples) // 2
    early, late = samples[:half], samples[half:]

    def most(part: list[tuple[float, Footprint]], name: str) -> int:
        return max(getattr(sample, name) for _, sample in part)

    report(
        growth_per_hour=hourly,
        first_mib=resident[0] / 2**20,
        last_mib=resident[-1] / 2**20,
        files=most(late, "num_files"),
        threads=most(late, "num_threads"),
    )
    assert most(late, "num_files") <= most(early, "num_files") + 8  # the connections of one moment differ
    assert most(late, "num_threads") <= most(early, "num_threads")
    assert hourly < 0.01 or seconds < 3600
    assert most(late, "resident_bytes") < most(early, "resident_bytes") * 1.05
    server.wait_idle()
