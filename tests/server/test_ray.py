"""A server whose workers are on a Ray cluster: answers of one process, and engines that come back when they die."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_cluster
from ray_cluster import ranks
from serving import RunningServer

from tests.waiting import wait_until

pytestmark = pytest.mark.nightly
BACKEND = ("--distributed-executor-backend", "ray", "--max-model-len", "256")
FIELDS = {"max_tokens": 16, "temperature": 0.8, "seed": 3, "logprobs": 2}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster of two raylets with two CPUs each."""
    pytest.importorskip("ray")
    for name, value in ray_cluster.ENV.items():
        monkeypatch.setenv(name, value)
    try:
        ray_cluster.start()
        yield
    finally:
        ray_cluster.stop()


def test_ranks_on_two_nodes(two_nodes: None, server: RunningServer, tmp_path: Path) -> None:
    expected = server.complete("Once upon a time", **FIELDS)["choices"]
    for flags in (["-tp", "2", "--ray-placement", "STRICT_SPREAD"], ["-pp", "2"]):
        several = RunningServer(tmp_path / "log", *BACKEND, *flags)
        assert several.complete("Once upon a time", **FIELDS)["choices"] == expected
        assert len(ranks()) == 2
        several.stop()
        wait_until(lambda: not ranks(), 10, "a rank is left")


def test_a_rank_that_dies_ends_the_server(two_nodes: None, tmp_path: Path) -> None:
    server = RunningServer(tmp_path / "log", *BACKEND, "-tp", "2")
    os.kill(ranks()[0], signal.SIGKILL)
    assert server.process.wait(15) == 1
    assert "ended unexpectedly" in server.log()
    wait_until(lambda: not ranks(), 10, "a rank is left")


def test_engines_share_a_cluster_and_come_back(two_nodes: None, server: RunningServer, tmp_path: Path) -> None:
    expected = server.complete("Once upon a time", **FIELDS)["choices"]
    pair = RunningServer(tmp_path / "log", *BACKEND, "-dp", "2", "-tp", "2", "--api-key", "sk-ray")

    def states() -> list[str]:
        return [engine["state"] for engine in pair.get("/admin/engines").json()["data"]]

    for _ in range(2):
        assert len(ranks()) == 4
        assert pair.complete("Once upon a time", **FIELDS)["choices"] == expected
        os.kill(ranks()[0], signal.SIGKILL)  # of one engine
        wait_until(lambda: states() != ["up", "up"], 10, "the engine's end was not told")
        assert pair.get("/health").status == 200
        assert pair.complete("Once upon a time", **FIELDS)["choices"] == expected
        wait_until(lambda: states() == ["up", "up"], 60, "the engine did not come back")
    pair.signal(signal.SIGTERM)
    assert pair.process.wait(20) == 0
    wait_until(lambda: not pair.processes(), 10, "a process is left")
    wait_until(lambda: not ranks(), 10, "a rank is left")


def test_engines_without_a_cluster_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "quire", "serve", "demo", *BACKEND, "-dp", "2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "no Ray cluster on this machine" in done.stderr
    assert "ray start --head" in done.stderr
