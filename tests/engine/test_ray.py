"""Workers on Ray: the same answers from one node and from two (raylets of this machine), and a clear end of each fault.

`make test-ray` installs Ray and runs this; without it, and but for nightly runs, nothing happens here.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_exactness import VARIANTS, changes_of, engine, requests, run
from test_lora import adapters, check_adapters
from test_processes import check_reducing, marked
from test_weights_at_run_time import OPTIONS, check_weights, other

from quire import LLM, SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, EngineDeadError
from quire.executor.ray import Actors
from quire.executor.remote import RemoteExecutor
from quire.lora.request import LoRARequest

__all__ = ["adapters", "other"]  # fixtures of tests here
pytestmark = pytest.mark.nightly
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "gemma3", "opt", "gpt2"]
STORE: dict[str, Any] = {"object_store_memory": 10**8}
RAY: dict[str, Any] = {"distributed_executor_backend": "ray"}
TP2: dict[str, Any] = {"tensor_parallel_size": 2, **RAY}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2, **RAY}
APART: dict[str, Any] = {"ray_placement": "STRICT_SPREAD"}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Any]:
    """What starts a cluster with so many CPUs on each node, to which this process is then connected."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    running: list[tuple[list[int], Any]] = []

    def end() -> None:
        for _, cluster in running:
            ray.shutdown()
            cluster.shutdown()
        running.clear()

    def start(nodes: list[int], anew: bool = False) -> Any:
        if anew or not running or running[0][0] != nodes:
            end()
            head = {"num_cpus": nodes[0], "include_dashboard": False, **STORE}
            cluster = Cluster(initialize_head=True, head_node_args=head)
            for num_cpus in nodes[1:]:
                cluster.add_node(num_cpus=num_cpus, **STORE)
            cluster.wait_for_nodes()
            ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
            running.append((nodes, cluster))
        return running[0][1]

    start.end = end  # pyright: ignore[reportFunctionMemberAccess]
    yield start
    end()


@pytest.fixture(scope="module", params=[[2], [1, 1]], ids=["one node", "two nodes"])
def nodes(request: pytest.FixtureRequest) -> list[int]:
    """CPUs of each node."""
    return request.param


@pytest.fixture
def cluster(nodes: list[int], clusters: Any) -> Iterator[Any]:
    """A cluster whose CPUs are all free again, and its actors gone, within ten seconds of a test."""
    import ray  # pyright: ignore[reportMissingImports]

    started, memory = clusters(nodes), named_memory()
    yield started
    if ray.is_initialized() and len([node for node in ray.nodes() if node["Alive"]]) == len(nodes):
        end = time.monotonic() + 10
        while (free := ray.available_resources().get("CPU", 0)) < sum(nodes) and time.monotonic() < end:
            time.sleep(0.1)
        assert free == sum(nodes)
    assert named_memory() <= memory


def named_memory() -> set[Path]:
    return {path for path in Path("/dev/shm").iterdir() if "quire" in path.name}


def places(one: LLMEngine) -> list[tuple[str, int]]:
    """Node and process of each rank."""
    executor = one.executor
    assert isinstance(executor, RemoteExecutor)
    assert isinstance(executor.workers, Actors)
    return [(node, process) for _, node, process, _ in executor.workers._places]


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate(["The"] * 4, LONG, use_tqdm=False)


def expect_no_process(process: int, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while Path(f"/proc/{process}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{process}").exists()


def check_exactness(options: dict[str, Any], dtype: str = "bfloat16", **changes: Any) -> None:
    """Forks, beams, preemption and prefix hits."""
    variant = VARIANTS[15]._replace(late=False, tier="none")
    base = engine(options, dtype, **{name: changes[name] for name in ("quantization", "kernels") if name in changes})
    todo = requests(base.config.model.vocab_size)
    expected = run(base, todo, 1)
    several = engine(options, dtype, **changes_of(variant, ""), **changes)
    assert run(several, todo, variant.together) == expected
    assert run(several, todo, variant.together) == expected, "found in the prefix cache"
    assert several.stats().num_preemptions_total > 0
    several.executor.stop()


@pytest.mark.parametrize("size", [TP2, PP2], ids=["TP 2", "PP 2"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"quantization": "int8"},
        {"kernels": "torch"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "draft_model", "model": "demo-draft"}},
    ],
    ids=["bf16", "int8", "plain torch", "ngram", "draft model"],
)
def test_exactness(cluster: Any, model_options: Any, size: dict[str, Any], changes: dict[str, Any]) -> None:
    check_exactness(model_options("demo"), **changes, **size)


@pytest.mark.parametrize("nodes", [[1, 1]], indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [TP2, PP2], ids=["TP 2", "PP 2"])
def test_every_family_on_two_nodes(cluster: Any, model_options: Any, family: str, size: dict[str, Any]) -> None:
    check_exactness(model_options(family), **size)


def test_ranks_that_reduce_answer_alike_alone_and_in_batches(cluster: Any) -> None:
    check_reducing(**RAY)


@pytest.mark.parametrize("size", [TP2, PP2], ids=["TP 2", "PP 2"])
def test_workers_sleep_and_take_other_weights(cluster: Any, size: dict[str, Any], other: Path) -> None:
    llm = LLM("demo", **OPTIONS, **size)
    check_weights(llm, other)
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("size", [TP2, PP2], ids=["TP 2", "PP 2"])
def test_workers_share_adapters(cluster: Any, size: dict[str, Any], adapters: list[LoRARequest]) -> None:
    check_adapters(size, adapters)


@pytest.mark.parametrize("nodes", [[2, 2]], indirect=True)
def test_stages_are_apart_and_their_ranks_together(cluster: Any, model_options: Any) -> None:
    options = model_options("demo")
    check_exactness(options, **TP2 | PP2)
    one = engine(options, "bfloat16", **TP2 | PP2)
    nodes = [node for node, _ in places(one)]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    one.executor.stop()
    one = engine(options, "bfloat16", **PP2, ray_placement="STRICT_PACK")
    assert len({node for node, _ in places(one)}) == 1
    one.executor.stop()
    one = engine(options, "bfloat16", **TP2, **APART)
    assert len({node for node, _ in places(one)}) == 2
    one.executor.stop()


@pytest.mark.parametrize("size", [TP2, PP2], ids=["TP 2", "PP 2"])
def test_interrupts_change_no_answer(cluster: Any, size: dict[str, Any]) -> None:
    prompts = ["Once upon a time", "The", "It was"]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, logprobs=2, ignore_eos=True)
    expected = [[c.token_ids for c in out.outputs] for out in LLM("demo").generate(prompts, params, use_tqdm=False)]
    llm = LLM("demo", num_kv_blocks=512, **size)
    for i in range(5):
        threading.Timer(0.1 * (i + 1), os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            generate_for_ever(llm)
    found = [[c.token_ids for c in out.outputs] for out in llm.generate(prompts, params, use_tqdm=False)]
    assert found == expected
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("size", [TP2, PP2], ids=["TP 2", "PP 2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_is_told(cluster: Any, size: dict[str, Any], number: signal.Signals, rank: int) -> None:
    llm = LLM("demo", num_kv_blocks=512, **size)
    processes = [process for _, process in places(llm.llm_engine)]
    ended = list[float]()
    threading.Timer(0.5, lambda: (ended.append(time.monotonic()), os.kill(processes[rank], number))).start()
    what = "ended unexpectedly" if number == signal.SIGKILL else "no sign of life for 5 s"
    with pytest.raises(EngineDeadError, match=rf"rank {rank} of 2 \(process {processes[rank]} on Ray's node .*{what}"):
        generate_for_ever(llm)
    assert time.monotonic() - ended[0] < 10
    for process in processes:
        expect_no_process(process)
    llm.llm_engine.shutdown()


@pytest.mark.parametrize("nodes", [[1]], indirect=True)
def test_an_idle_worker_that_dies_is_told_to_who_comes_next(cluster: Any) -> None:
    llm = LLM("demo", num_kv_blocks=512, **RAY)
    os.kill(places(llm.llm_engine)[0][1], signal.SIGKILL)
    time.sleep(2)
    with pytest.raises(EngineDeadError, match="rank 0 of 1 .*ended unexpectedly"):
        llm.generate("The", use_tqdm=False)


def test_a_dead_raylet_is_told(clusters: Any) -> None:
    import ray  # pyright: ignore[reportMissingImports]

    cluster = clusters([1, 1], anew=True)
    for size in (TP2, PP2):
        llm = LLM("demo", num_kv_blocks=512, **size)
        here = ray.get_runtime_context().get_node_id()
        [(lost, process)] = [(node.split()[1], process) for node, process in places(llm.llm_engine) if here not in node]
        [raylet] = [node for node in cluster.list_all_nodes() if node.node_id == lost]
        ended = list[float]()
        threading.Timer(0.5, lambda: (ended.append(time.monotonic()), raylet.kill_raylet())).start()  # noqa: B023
        with pytest.raises(EngineDeadError, match=r"rank \d of 2 .*(ended unexpectedly|no sign of life)"):
            generate_for_ever(llm)
        assert time.monotonic() - ended[0] < 10
        expect_no_process(process)
        llm.llm_engine.shutdown()
        cluster.remove_node(raylet, allow_graceful=False)
        cluster.add_node(num_cpus=1, **STORE)
        cluster.wait_for_nodes()


@pytest.mark.parametrize("nodes", [[1, 1]], indirect=True)
def test_what_does_not_fit_is_told(cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"3 ranks ask for 1 CPU each .* has 2 on 2 node"):
        LLM("demo", tensor_parallel_size=3, **RAY)
    with pytest.raises(ConfigError, match="ray_placement='STRICT_PACK'"):
        LLM("demo", ray_placement="STRICT_PACK", **TP2)
    with pytest.raises(ConfigError, match="there is no memory for a KV cache"):
        LLM("demo", num_kv_blocks=10**9, **RAY)
    one = LLM("demo", num_kv_blocks=512, **RAY)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"of which 1 are free: end what holds them"):
        LLM("demo", **TP2)
    assert time.monotonic() - start < 10
    one.llm_engine.shutdown()


def test_a_cluster_of_our_own_ends_with_us(clusters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters.end()
    mark = uuid.uuid4().hex
    monkeypatch.setenv("QUIRE_TEST_MARK", mark)
    script = (
        "import sys; from quire import LLM\n"
        "llm = LLM('demo', distributed_executor_backend='ray', num_kv_blocks=512)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    for how in ("ends", "is killed"):
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert "ready\n" in process.stdout
        assert len(marked(mark)) > 3
        if how == "is killed":
            process.kill()
        process.communicate()
        end = time.monotonic() + 10
        while any(b"Agent" not in command_of(one) for one in marked(mark)) and time.monotonic() < end:
            time.sleep(0.1)
        assert all(b"Agent" in command_of(one) for one in marked(mark))
        while marked(mark) and time.monotonic() < end + 110:  # Ray's agents wait a minute for a head that was killed
            time.sleep(0.5)
        assert not marked(mark)


def command_of(process: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b"Agent"
