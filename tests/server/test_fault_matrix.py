"""Each process of a server with ranks, stages or engines is killed or stopped, at each stage of its life.

A defined end (what failed, told to who waits and in the log) or, where another engine is up, a way on; nothing is
left. The victim does it to itself, when the stage is reached, by a `sitecustomize` that every Python process imports.
So no test depends on time, but for the most that an end may take: 10 s, and on a machine that others use thrice that.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import Answer, RunningServer, live_processes, wait_until

pytestmark = pytest.mark.nightly

SECONDS = 30.0  # 10 where nobody else computes
KEY = ("--api-key", "sk-faults")
WAYS = {"TP 2": ("-tp", "2"), "PP 2": ("-pp", "2"), "DP 2": ("-dp", "2")}
RANKS = ["server", "engine 0", "rank 0", "rank 1"]
PROCESSES = {"TP 2": RANKS, "PP 2": RANKS, "DP 2": ["server", "engine 0", "engine 1"]}
STAGES = ["loading", "idle", "prefill", "decode"]
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]

_VICTIM = """
import os, sys
role, stage, number, place = os.environ.get("QUIRE_TEST_FAULT", "none,,9,").split(",")
words = sys.orig_argv
def fail():
    try:
        os.close(os.open(place, os.O_CREAT | os.O_EXCL))
    except FileExistsError:  # one that was started again in the victim's place
        return
    os.kill(os.getpid(), int(number))
def at(owner, name, counts=lambda *given: True):
    real, turn, count = getattr(owner, name), {"prefill": 1, "decode": 20}.get(stage, 1), 0
    def method(*given, **named):
        nonlocal count
        count += counts(*given)
        if count == turn:
            fail()
        return real(*given, **named)
    setattr(owner, name, method)
if "quire.entrypoints.worker" in words and role == "rank " + words[-3]:
    from quire.worker.runner import ModelRunner
    from quire.worker.worker import Worker
    at(*((Worker, "load") if stage == "loading" else (ModelRunner, "begin")))
elif words[-1] == "quire.engine.clients.process":
    from quire.engine import build
    from quire.engine.core import EngineCore
    make = build.build_core
    def made(*given, rank=0, **named):
        if role == f"engine {rank}":
            at(EngineCore, "step")
            if stage == "loading":
                fail()
        return make(*given, rank=rank, **named)
    build.build_core = made
elif "serve" in words and role == "server":
    from quire.engine.async_llm import AsyncLLM
    from quire.protocol.core import News
    at(AsyncLLM, "_on_event", lambda llm, event: isinstance(event, News) and bool(event.scheduled or event.outputs))
"""


class Fault:
    """What is to happen, and how the processes of a server are told."""

    def __init__(self, home: Path, way: str, role: str, stage: str, number: int) -> None:
        self.way, self.role, self.stage, self.number = way, role, stage, number
        self.happened = home / "happened"
        (home / "site").mkdir()
        (home / "site" / "sitecustomize.py").write_text(_VICTIM)
        (home / "tmp").mkdir()
        self.sockets = home / "tmp"
        told = "none" if stage == "idle" or (role == "server" and stage == "loading") else role
        self.env = {
            "PYTHONPATH": str(home / "site"),
            "TMPDIR": str(self.sockets),
            "QUIRE_TEST_FAULT": f"{told},{stage},{int(number)},{self.happened}",
        }
        self.flags = (*WAYS[way], "--max-num-batched-tokens", "32", *KEY)


@pytest.fixture(autouse=True)
def no_memory_left() -> Iterator[None]:
    before = set(Path("/dev/shm").iterdir())
    yield
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "quire" in path.name]


def role_of(pid: int, engines: list[int]) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    if "quire.entrypoints.worker" in words:
        return f"rank {words[-3]}"
    return f"engine {engines.index(pid)}" if pid in engines else "server" if "serve" in words else "another"


def pid_of(server: RunningServer, role: str) -> int:
    pids = sorted(server.processes())
    engines = [pid for pid in pids if b"quire.engine.clients.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return next(pid for pid in pids if role_of(pid, engines) == role)


def assert_gone(pid: int, fault: Fault) -> None:
    wait_until(lambda: not list(live_processes(pid)), SECONDS, "processes are left")
    wait_until(lambda: not os.listdir(fault.sockets), SECONDS, f"left: {os.listdir(fault.sockets)}")


def check_loading(home: Path, fault: Fault) -> None:
    """No server comes up: one line says why. A server that was stopped itself goes on."""
    log = home / "log"
    command = [sys.executable, "-m", "quire", "serve", "demo", "--host", "127.0.0.1", "--port", "0", *fault.flags]
    with log.open("wb") as output:
        given = {"stdout": output, "stderr": output, "env": os.environ | fault.env, "start_new_session": True}
        process = subprocess.Popen(command, **given)
    try:
        if fault.role == "server":
            wait_until(lambda: b"loading" in log.read_bytes(), 60)
            process.send_signal(fault.number)
            if fault.number == signal.SIGSTOP:
                time.sleep(1.0)
                process.send_signal(signal.SIGCONT)
                wait_until(lambda: b"Quire is ready" in log.read_bytes(), 60)
                process.send_signal(signal.SIGTERM)
                assert process.wait(SECONDS) == 0, log.read_text()
        else:
            wait_until(fault.happened.exists, 60)
            start = time.monotonic()
            assert process.wait(SECONDS) not in (0, -signal.SIGKILL), log.read_text()
            print(f"\n  {time.monotonic() - start:.1f} s: {log.read_text().splitlines()[-1]}")
            *_, last = log.read_text().splitlines()
            assert last.startswith("error: "), log.read_text()
            name = f"{fault.role} of 2" if fault.role.startswith("rank") else "engine"
            assert name in last, last
        process.wait(SECONDS)
        assert_gone(process.pid, fault)
    finally:
        for pid in live_processes(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def begin(server: RunningServer, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    """A request for each engine, of some steps of prefill and many of decoding."""
    fields = {"max_tokens": 300, "ignore_eos": True, "stream": True}
    prompts = [[5 + i] * 100 for i in range(2)]
    return [pool.submit(server.post, "/v1/completions", fields | {"prompt": prompt}) for prompt in prompts]


def check_running(server: RunningServer, fault: Fault) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = [] if fault.stage == "idle" else begin(server, pool)
        if fault.stage == "idle":
            victim = pid_of(server, fault.role)
            os.kill(victim, fault.number)
        else:
            wait_until(fault.happened.exists, 60)
        start = time.monotonic()
        if fault.role == "server":
            goes_on = fault.number == signal.SIGSTOP
            if goes_on:
                time.sleep(1.0)
                server.signal(signal.SIGCONT)
            check_answers(answers, whole=goes_on, told=False)
            if goes_on:
                return
        elif fault.way == "DP 2":
            check_answers(answers, whole=fault.stage == "prefill", told=True)
            assert server.get("/health").status == 200
            assert server.complete("Once upon a time", max_tokens=4)["choices"]

            def is_back() -> bool:
                engines = server.get("/admin/engines").json()["data"]
                return [(one["state"], one["num_restarts"]) for one in engines] == [
                    ("up", int(fault.role == f"engine {i}")) for i in range(2)
                ]

            wait_until(is_back, 2 * SECONDS, "it did not come back")
            return
        else:
            check_answers(answers, whole=False, told=True)
        assert server.process.wait(SECONDS) == (-signal.SIGKILL if fault.role == "server" else 1), server.log()
        print(f"\n  {time.monotonic() - start:.1f} s: {server.log().splitlines()[-1]}")
        assert_gone(server.process.pid, fault)
        if fault.role.startswith("rank"):
            what = "SIGKILL" if fault.number == signal.SIGKILL else "no sign of life"
            assert f"the worker of {fault.role} of 2" in server.log()
            assert what in server.log()


def check_answers(answers: list[Future[Answer]], whole: bool, told: bool) -> None:
    """All are there; those that are not whole end with an error, or (not `told`) with the connection."""
    num_whole = 0
    for answer in answers:
        try:
            body = answer.result(2 * SECONDS).body.decode()
        except Exception:
            assert not told
            continue
        num_whole += '"finish_reason":"length"' in body
        assert '"finish_reason":"length"' in body or "server_error" in body or "engine_dead" in body, body[-500:]
    assert num_whole == len(answers) if whole else num_whole < max(1, len(answers))


def cells() -> list[tuple[str, str, str, signal.Signals]]:
    return [(way, role, stage, n) for way in WAYS for role in PROCESSES[way] for stage in STAGES for n in SIGNALS]


@pytest.mark.parametrize(("way", "role", "stage", "number"), cells())
def test_a_process_breaks(
    way: str,
    role: str,
    stage: str,
    number: signal.Signals,
    tmp_path: Path,
    start_server: Callable[..., RunningServer],
) -> None:
    fault = Fault(tmp_path, way, role, stage, number)
    if stage == "loading":
        check_loading(tmp_path, fault)
        return
    check_running(start_server(*fault.flags, env=fault.env), fault)
