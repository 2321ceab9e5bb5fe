"""A real server with two engines: answers of one, figures of each, and no request lost by a restart or a sudden death.

Each fault is one engine's: the other goes on, /health stays well, and the broken one comes back by itself.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Answer, RunningServer, command_line

from tests.waiting import wait_until

pytestmark = pytest.mark.slow

KEY = "sk-engines"
BACK_SECONDS = 30.0
TOLD_SECONDS = 10.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = RunningServer(tmp_path_factory.mktemp("pair") / "log", "--data-parallel-size", "2", "--api-key", KEY)
    yield server
    server.stop()


def states(server: RunningServer) -> list[str]:
    return [engine["state"] for engine in server.get("/admin/engines").json()["data"]]


def wait_up(server: RunningServer) -> None:
    wait_until(lambda: states(server) == ["up", "up"], BACK_SECONDS, "the engine did not come back")
    server.wait_idle()


def engines_of(server: RunningServer) -> set[int]:
    return {pid for pid in server.processes() if b"entrypoints.engine" in command_line(pid)}


def by_engine(server: RunningServer, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(server.get("/metrics").body.decode())
    samples = (sample for family in families for sample in family.samples)
    return {sample.labels["engine"]: sample.value for sample in samples if sample.name == name}


def test_answers_are_those_of_one_engine_whoever_gives_them(pair: RunningServer, server: RunningServer) -> None:
    def answer(of: RunningServer, number: int) -> Any:
        fields = {"max_tokens": 24, "temperature": 0.8, "seed": number, "n": 2, "logprobs": 2}
        return [(c["text"], c["logprobs"]) for c in of.complete(f"Number {number} said", **fields)["choices"]]

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: answer(pair, number), range(12)))
    assert answers == [answer(server, number) for number in range(12)]
    looked_up = by_engine(pair, "vllm:prefix_cache_queries_total")
    assert looked_up.keys() == {"0", "1"}
    assert all(looked_up.values()), "both computed some"
    assert pair.golden() == server.golden()


def test_prompts_that_begin_alike_go_where_they_are_cached(pair: RunningServer) -> None:
    text = "The bridge over the river was old, and nobody knew who had built it. " * 6
    pair.complete(text, max_tokens=1)
    for number in range(4):
        usage = pair.complete(text + f"Then {number}", max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_pins_limits_and_resets_are_for_both(pair: RunningServer) -> None:
    pinned = pair.post("/admin/prefixes", {"prompt": "Once upon a time " * 20, "name": "p"})
    assert pinned.status == 200, pinned.body
    wait_until(lambda: set(by_engine(pair, "quire:kv_blocks_pinned").values()) == {pinned.json()["num_blocks"]}, 5.0)
    assert [entry["name"] for entry in pair.get("/admin/prefixes").json()["data"]] == ["p"]
    assert pair.request("DELETE", "/admin/prefixes/p").status == 200
    assert pair.post("/admin/limits", {"max_num_seqs": 33}).status == 200
    wait_until(lambda: set(by_engine(pair, "quire:max_num_seqs").values()) == {33}, 5.0)
    assert pair.request("POST", "/reset_prefix_cache").status == 200


def begin_all(server: RunningServer, pool: ThreadPoolExecutor, count: int = 6) -> list[Future[Answer]]:
    """Streams of some seconds, which both engines have begun."""
    fields = {"prompt": [5] * 4, "max_tokens": 508, "ignore_eos": True, "n": 8, "stream": True}
    answers: list[Future[Answer]] = []

    def have_begun() -> bool:
        if all(answer.done() for answer in answers):  # too quick to be seen, or not yet sent
            answers[:] = [pool.submit(server.post, "/v1/completions", fields) for _ in range(count)]
        return all(by_engine(server, "vllm:num_requests_running").values())

    wait_until(have_begun, 60.0)
    return answers


def test_restart_loses_no_request_and_no_limit(pair: RunningServer) -> None:
    wait_up(pair)
    assert pair.post("/admin/limits", {"max_num_seqs": 34}).status == 200
    before = engines_of(pair)
    with ThreadPoolExecutor(8) as pool:
        streams = begin_all(pair, pool)
        assert pair.post("/admin/engines/1/restart", {}).status == 202
        assert pair.post("/admin/engines/0/restart", {}).status == 400, "one at a time"
        while states(pair) != ["up", "up"]:
            pair.complete("And then", max_tokens=2)
            time.sleep(0.05)  # the new engine, too, needs the processor
    for stream in streams:
        assert stream.result().events()[-1]["choices"][0]["finish_reason"] == "length"
    after = engines_of(pair)
    assert len(after) == 2
    assert len(before & after) == 1
    wait_until(lambda: set(by_engine(pair, "quire:max_num_seqs").values()) == {34}, 5.0)
    assert pair.post("/admin/engines/7/restart", {}).status == 400


@pytest.mark.parametrize(
    ("number", "busy"), [(signal.SIGKILL, True), pytest.param(signal.SIGSTOP, False, marks=pytest.mark.nightly)]
)
def test_an_engine_breaks_alone(pair: RunningServer, number: int, busy: bool) -> None:
    wait_up(pair)
    victim = min(engines_of(pair))
    with ThreadPoolExecutor(8) as pool:
        streams = begin_all(pair, pool) if busy else []
        os.kill(victim, number)
        assert pair.get("/health").status == 200
        wait_until(lambda: "starting" in states(pair), TOLD_SECONDS, "nobody noticed")
        assert pair.get("/health").status == 200
        assert pair.complete("Once upon a time", max_tokens=4)["choices"]
    bodies = [stream.result().body.decode() for stream in streams]
    broken = [body for body in bodies if "This request is not complete" in body]
    assert busy == (0 < len(broken) < len(bodies))
    assert all(body.count('"finish_reason":"length"') == 8 for body in bodies if body not in broken)
    wait_until(lambda: victim not in engines_of(pair), BACK_SECONDS, "it is still there")
    wait_up(pair)
    assert len(engines_of(pair)) == 2
    assert pair.complete("Once upon a time", max_tokens=4)["choices"]


def test_the_last_engines_death_ends_the_server(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--data-parallel-size", "2")
    for pid in engines_of(server):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.process.poll() is not None, TOLD_SECONDS, "the server still runs")
    assert server.process.returncode == 1
    wait_until(lambda: not server.processes(), TOLD_SECONDS, "the server left processes behind")
    assert "No other engine is up" in server.log()
