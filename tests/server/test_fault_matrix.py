"""Each process of a server with ranks, stages or engines is killed or stopped, at each stage of its life.

A defined end (what failed, told to who waits and in the log) or, where another engine is up, a way on; nothing is
left. The victim does it to itself, when the stage is reached, by a `sitecustomize` that every Python process imports.
An end has ten seconds on a quiet machine, from the fault on, and as much more as the machine was slower meanwhile.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import ray_cluster
from serving import Answer, RunningServer, command_line, live_processes
from slowness import Slowness

from tests.waiting import wait_until

pytestmark = pytest.mark.nightly

SECONDS = 10.0  # for an end, where nobody else computes
PATIENCE = 200.0  # with a machine that others use
KEY = ("--api-key", "sk-faults")
RAY = ("--distributed-executor-backend", "ray")
WAYS = {"TP 2": ("-tp", "2"), "PP 2": ("-pp", "2"), "DP 2": ("-dp", "2")}
WAYS |= {f"Ray {way}": (*flags, *RAY) for way, flags in WAYS.items()}
RANKS = ["server", "engine 0", "rank 0", "rank 1"]
PROCESSES = {
    "TP 2": RANKS,
    "PP 2": RANKS,
    "DP 2": ["server", "engine 0", "engine 1"],
    "Ray TP 2": RANKS,
    "Ray PP 2": ["rank 0", "rank 1", "raylet 0", "raylet 1"],  # raylet 0: of the server's node
    "Ray DP 2": ["rank 0", "raylet 1"],
}
STAGES = ["loading", "idle", "prefill", "decode"]
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]

_VICTIM = """
import os, sys
from pathlib import Path
words = sys.orig_argv
def told():
    role, stage, number, place = Path(os.environ["QUIRE_TEST_FAULT"]).read_text().split(",")
    return role, stage, int(number), Path(place)
def fail():
    role, _, number, place = told()
    try:
        os.close(os.open(place, os.O_CREAT | os.O_EXCL))
    except FileExistsError:  # one that was started again in the victim's place
        return
    os.kill(os.getppid() if "raylet" in role else os.getpid(), number)
def at(owner, name, counts=lambda *given: True):
    real, count = getattr(owner, name), 0
    def method(*given, **named):
        nonlocal count
        count += counts(*given)
        if count == {"prefill": 1, "decode": 20}.get(told()[1], 1):
            count += 1
            fail()
        return real(*given, **named)
    setattr(owner, name, method)
if "quire.entrypoints.worker" in words or any(word.endswith("default_worker.py") for word in words):
    from quire.executor.orders import ORDERS
    from quire.executor.rank import Rank
    def counts(served, number, body):
        role, stage, _, place = told()
        order, node = list(ORDERS)[number], os.environ.get("QUIRE_TEST_NODE", "none")
        chosen = role in (f"rank {served.rank}", f"raylet {node}")
        if order == "load":
            place.with_name(f"rank {served.rank}").write_text(str(os.getpid()))
            from quire.worker.worker import Worker
            if chosen and stage == "loading":
                at(Worker, "load")
        return chosen and stage != "loading" and order == "begin"
    at(Rank, "carry_out", counts)
elif words[-1] == "quire.entrypoints.engine":
    from quire.engine import build
    from quire.engine.core import EngineCore
    make = build.build_core
    def made(*given, rank=0, **named):
        if told()[0] == f"engine {rank}":
            at(EngineCore, "step")
            if told()[1] == "loading":
                fail()
        return make(*given, rank=rank, **named)
    build.build_core = made
elif "serve" in words and told()[0] == "server":
    from quire.engine.async_llm import AsyncLLM
    from quire.protocol.core import News
    at(AsyncLLM, "_on_event", lambda llm, event: isinstance(event, News) and bool(event.scheduled or event.outputs))
"""


class Fault:
    """What is to happen, and how the processes of a server are told: in the file `plan`."""

    def __init__(self, home: Path, way: str, role: str, stage: str, number: int) -> None:
        self.way, self.role, self.stage, self.number = way, role, stage, number
        self.on_ray = way.startswith("Ray")
        self.happened = home / "happened"
        (home / "tmp").mkdir()
        self.sockets = home / "tmp"
        told = "none" if stage == "idle" or (role == "server" and stage == "loading") else role
        self.plan = f"{told},{stage},{int(number)},{self.happened}"
        self.env = {"TMPDIR": str(self.sockets), "OMP_NUM_THREADS": "2" if way == "Ray DP 2" else "1"}
        if self.on_ray:
            self.env |= ray_cluster.ENV
        self.flags = (*WAYS[way], "--max-num-batched-tokens", "32", *KEY)

    def begin(self, victim: int) -> None:
        """Do it to a process that is idle."""
        os.kill(victim, self.number)
        self.happened.touch()

    def check_seconds(self, slowness: Slowness) -> None:
        """Since it happened there went no more than what is allowed."""
        seconds = time.time() - self.happened.stat().st_mtime
        print(f"\n  {seconds:.1f} s, the machine {slowness():.1f} times as slow as a quiet one")
        assert seconds < SECONDS * slowness()


class RayNodes:
    """The cluster on which ranks are, started when it is first asked for, and anew when a node was lost."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env, self._runs = env, False

    def start(self) -> None:
        if not self._runs:
            ray_cluster.start(**self._env)
            self._runs = True

    def replace(self, node: int) -> None:
        ray_cluster.start_node(node, **self._env)

    def stop(self) -> None:
        if self._runs:
            ray_cluster.stop()
            self._runs = False


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str], RayNodes]]:
    """The file that a fault's plan is written to, the environment of all processes, and the Ray cluster."""
    home = tmp_path_factory.mktemp("victims")
    (home / "sitecustomize.py").write_text(_VICTIM)
    (home / "plan").write_text(f"none,none,9,{home / 'none'}")
    env = {"PYTHONPATH": str(home), "QUIRE_TEST_FAULT": str(home / "plan")}
    nodes = RayNodes(env)
    yield home / "plan", env, nodes
    nodes.stop()


@pytest.fixture(autouse=True)
def no_memory_left() -> Iterator[None]:
    before = set(Path("/dev/shm").iterdir())
    yield
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "quire" in path.name]


def role_of(pid: int, engines: list[int]) -> str:
    words = command_line(pid).decode().split("\0")[:-1]
    if "quire.entrypoints.worker" in words:
        return f"rank {words[-3]}"
    return f"engine {engines.index(pid)}" if pid in engines else "server" if "serve" in words else "another"


def pid_of(server: RunningServer, fault: Fault) -> int:
    if "raylet" in fault.role:
        return ray_cluster.raylet(int(fault.role.split()[1]))
    if fault.on_ray and "rank" in fault.role:
        return int(fault.happened.with_name(fault.role).read_text())
    pids = sorted(server.processes())
    engines = [pid for pid in pids if b"quire.entrypoints.engine" in command_line(pid)]
    return next(pid for pid in pids if role_of(pid, engines) == fault.role)


def assert_gone(pid: int, fault: Fault) -> None:
    wait_until(lambda: not list(live_processes(pid)), PATIENCE, "processes are left")
    wait_until(lambda: not (fault.on_ray and ray_cluster.ranks()), PATIENCE, "ranks are left")
    wait_until(lambda: not os.listdir(fault.sockets), PATIENCE, f"left: {os.listdir(fault.sockets)}")


def check_loading(home: Path, fault: Fault, env: dict[str, str], slowness: Slowness) -> None:
    """No server comes up: one line says why. A server that was stopped itself goes on."""
    log = home / "log"
    command = [sys.executable, "-m", "quire", "serve", "demo", "--host", "127.0.0.1", "--port", "0", *fault.flags]
    with log.open("wb") as output:
        given = {"stdout": output, "stderr": output, "env": os.environ | env, "start_new_session": True}
        process = subprocess.Popen(command, **given)
    try:
        if fault.role == "server":
            wait_until(lambda: b"loading" in log.read_bytes(), PATIENCE)
            process.send_signal(fault.number)
            if fault.number == signal.SIGSTOP:
                time.sleep(1.0)
                process.send_signal(signal.SIGCONT)
                wait_until(lambda: b"Quire is ready" in log.read_bytes(), PATIENCE)
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == 0, log.read_text()
        else:
            wait_until(fault.happened.exists, PATIENCE)
            if fault.role.startswith("raylet") and "DP" in fault.way:  # actors outlive it, perhaps until both are up
                wait_until(lambda: process.poll() is not None or b"Quire is ready" in log.read_bytes(), PATIENCE)
                if process.poll() is None:
                    wait_until(
                        lambda: b"engine 1 is dead" in log.read_bytes() or b"engine 0 is dead" in log.read_bytes(),
                        PATIENCE,
                    )
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(PATIENCE) == 0, log.read_text()
                    return assert_gone(process.pid, fault)
            assert process.wait(PATIENCE) not in (0, -signal.SIGKILL), log.read_text()
            fault.check_seconds(slowness)
            *_, last = log.read_text().splitlines()
            print(f"  {last}")
            assert last.startswith("error: "), log.read_text()
            num_ranks = 1 if "DP" in fault.way else 2
            assert re.search(rf"{fault.role} of {num_ranks}|engine" if "rank" in fault.role else "engine|rank", last), (
                last
            )
        process.wait(PATIENCE)
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


def check_running(server: RunningServer, fault: Fault, nodes: RayNodes, slowness: Slowness) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = [] if fault.stage == "idle" else begin(server, pool)
        if fault.stage == "idle":
            fault.begin(pid_of(server, fault))
        else:
            wait_until(fault.happened.exists, PATIENCE)
        if fault.role == "server":
            goes_on = fault.number == signal.SIGSTOP
            if goes_on:
                time.sleep(1.0)
                server.signal(signal.SIGCONT)
            check_answers(answers, whole=goes_on, told=False)
            if goes_on:
                return
        elif "DP 2" in fault.way:
            # A node's actors outlive its raylet, perhaps until all answers are whole.
            whole = None if "raylet" in fault.role else fault.stage == "prefill"
            check_answers(answers, whole=whole, told=True)
            check_others_go_on(server, fault, nodes, slowness)
            return
        else:
            check_answers(answers, whole=False, told=True)
        assert server.process.wait(PATIENCE) == (-signal.SIGKILL if fault.role == "server" else 1), server.log()
        fault.check_seconds(slowness)
        print(f"  {server.log().splitlines()[-1]}")
        assert_gone(server.process.pid, fault)
        if fault.role.startswith("rank"):
            what = "SIGKILL|ended unexpectedly" if fault.number == signal.SIGKILL else "no sign of life"
            assert re.search(f"the worker of {fault.role} of 2.*({what})", server.log()), server.log()


def check_others_go_on(server: RunningServer, fault: Fault, nodes: RayNodes, slowness: Slowness) -> None:
    """The other engine serves, and the one that ended comes back."""

    def engines() -> list[tuple[str, int]]:
        return [(one["state"], one["num_restarts"]) for one in server.get("/admin/engines").json()["data"]]

    def is_back() -> bool:
        (first, starts), (second, others) = engines()
        named = fault.role == f"engine {int(others > 0)}" or not fault.role.startswith("engine")
        return (first, second) == ("up", "up") and min(starts, others) == 0 < max(starts, others) and named

    wait_until(lambda: engines() != [("up", 0)] * 2, PATIENCE, "no end was told")
    fault.check_seconds(slowness)
    assert server.get("/health").status == 200
    assert server.complete("Once upon a time", max_tokens=4)["choices"]
    if "raylet" in fault.role:
        nodes.replace(1)
    wait_until(is_back, PATIENCE, f"it did not come back: {engines()}")
    server.signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
    assert_gone(server.process.pid, fault)


def check_answers(answers: list[Future[Answer]], whole: bool | None, told: bool) -> None:
    """All are there; those that are not whole end with an error, or (not `told`) with the connection.

    `whole`: all of them are (False: not all; None: as may be).
    """
    num_whole = 0
    for answer in answers:
        try:
            body = answer.result(PATIENCE).body.decode()
        except Exception:
            assert not told
            continue
        num_whole += '"finish_reason":"length"' in body
        assert '"finish_reason":"length"' in body or "server_error" in body or "engine_dead" in body, body[-500:]
    assert whole is None or (num_whole == len(answers) if whole else num_whole < max(1, len(answers)))


def cells() -> list[tuple[str, str, str, signal.Signals]]:
    found = [(way, role, stage, n) for way in WAYS for role in PROCESSES[way] for stage in STAGES for n in SIGNALS]
    return [cell for cell in found if "raylet" not in cell[1] or cell[3] == signal.SIGKILL]


@pytest.mark.parametrize(("way", "role", "stage", "number"), cells())
def test_a_process_breaks(
    way: str,
    role: str,
    stage: str,
    number: signal.Signals,
    tmp_path: Path,
    victims: tuple[Path, dict[str, str], RayNodes],
    start_server: Callable[..., RunningServer],
) -> None:
    plan, env, nodes = victims
    fault = Fault(tmp_path, way, role, stage, number)
    if fault.on_ray:
        pytest.importorskip("ray")
        nodes.start()
    plan.write_text(fault.plan)
    try:
        with Slowness() as slowness:
            if stage == "loading":
                check_loading(tmp_path, fault, env | fault.env, slowness)
            else:
                check_running(start_server(*fault.flags, env=env | fault.env), fault, nodes, slowness)
    finally:
        if "raylet" in role:
            nodes.stop()
