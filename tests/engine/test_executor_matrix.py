"""One matrix of who computes, what, and how: the answers of one process, to the last bit.

Each way to run a model (ranks, stages, engines, torchrun, Ray) answers the requests of `test_exactness` twice, on each
family's tiny model and the demo, in bfloat16 and int8, with and without drafts, with few blocks: forks and beams,
preemption, and prefixes that are found again. What is particular to one way has its tests elsewhere.
"""

import asyncio
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_exactness import Variant, changes_of, engine, facts, requests, run
from test_processes import nothing_left

from quire import AsyncLLM, EngineArgs, RequestOutput
from quire.entrypoints.server.replicas import ReplicasClient
from quire.errors import ConfigError
from quire.protocol.stats import EngineStats

__all__ = ["nothing_left"]  # a fixture of all tests here
pytestmark = pytest.mark.nightly

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2-moe", "gpt-oss", "gemma2", "gemma3", "opt", "gpt2"]
WEIGHTS: dict[str, dict[str, Any]] = {"bf16": {}, "int8": {"quantization": "int8"}}
# All at once, in small chunks, with too few blocks for all of them and enough for prefixes to stay.
FULL = Variant(32, 64, 16, prefix=True, preempted=True, late=False, policy="fcfs", tier="none")
LAUNCHER = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
RAY = {"distributed_executor_backend": "ray"}


class Ran(NamedTuple):
    """What one way made of the requests."""

    answers: list[list[Any]]  # of all requests, each time and from each rank that tells them
    stats: EngineStats


def on_engine(options: dict[str, Any]) -> Ran:
    """An engine in this process, wherever its workers are."""
    one = engine({}, "bfloat16", **options)
    todo = requests(one.config.model.vocab_size)
    answers = [run(one, todo, FULL.together) for _ in range(2)]
    stats = one.stats()
    one.executor.stop()
    return Ran(answers, stats)


def on_replicas(options: dict[str, Any]) -> Ran:
    """Two engines, each in its process, behind one client."""

    async def answer(llm: AsyncLLM, number: int, given: Any) -> list[Any]:
        last: RequestOutput | None = None
        async for output in llm.generate({"prompt_token_ids": given[0]}, given[1], request_id=str(number)):
            last = output
        assert last is not None
        return facts(last)

    async def scenario() -> Ran:
        args = EngineArgs(**options, dtype="bfloat16", max_num_seqs=32, debug=True, data_parallel_size=2)
        llm = AsyncLLM.from_engine_args(args, start=ReplicasClient)
        todo = requests(llm.config.model.vocab_size)
        try:
            both = [await asyncio.gather(*[answer(llm, *each) for each in enumerate(todo)]) for _ in range(2)]
            return Ran(both, llm.stats())
        finally:
            llm.shutdown()

    return asyncio.run(scenario())


def on_torchrun(options: dict[str, Any], num_ranks: int = 2) -> Ran:
    """Ranks that torchrun started; this file, run as a program, is each of them."""
    home = Path(options.pop("home"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*launcher, __file__, json.dumps(options | LAUNCHER), str(home)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    ranks = [Ran(*pickle.loads((home / f"rank{rank}").read_bytes())) for rank in range(num_ranks)]
    return Ran([answers for rank in ranks for answers in rank.answers], ranks[0].stats)


def of(**parallel: Any) -> Callable[[dict[str, Any]], Ran]:
    return lambda options: on_engine(options | parallel)


WAYS: dict[str, Callable[[dict[str, Any]], Ran]] = {
    "1 rank": of(distributed_executor_backend="mp"),
    "TP 2": of(tensor_parallel_size=2),
    "PP 2": of(pipeline_parallel_size=2),
    "TP 2 x PP 2": of(tensor_parallel_size=2, pipeline_parallel_size=2),
    "DP 2": on_replicas,
    "torchrun": on_torchrun,
    "Ray TP 2": of(tensor_parallel_size=2, **RAY),
    "Ray PP 2 on two raylets": of(pipeline_parallel_size=2, **RAY),
}


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], None]]:
    """`clusters(2)`: this process is connected to a Ray cluster of two raylets; skips where there is no Ray."""
    running: dict[int, Any] = {}

    def leave() -> None:
        import ray  # pyright: ignore[reportMissingImports]

        for cluster in running.values():
            ray.shutdown()
            cluster.shutdown()
        running.clear()

    def join(num_nodes: int) -> None:
        ray = pytest.importorskip("ray")
        try:
            EngineArgs("demo", tensor_parallel_size=2, **RAY)
        except ConfigError as error:
            pytest.skip(str(error))
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

        if num_nodes in running:
            return
        leave()
        cpus = 2 // num_nodes
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("QUIRE_TEST_MARK", raising=False)  # the cluster is to outlive one test
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
            for _ in range(num_nodes - 1):
                cluster.add_node(num_cpus=cpus)
        running[num_nodes] = cluster
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)

    yield join
    if running:
        leave()


@pytest.fixture(scope="module")
def expected(model_options: Any) -> Callable[[str, str], list[Any]]:
    """The answers of one process to each request alone; computed once a model and weight format."""
    known: dict[tuple[str, str], list[Any]] = {}

    def alone(model: str, weights: str) -> list[Any]:
        if (model, weights) not in known:
            one = engine(model_options(model) | WEIGHTS[weights], "bfloat16")
            known[model, weights] = run(one, requests(one.config.model.vocab_size), together=1)
        return known[model, weights]

    return alone


def drafting(model: str, drafts: str, model_options: Any) -> dict[str, Any]:
    """The option. The demo has a draft model; a random model's is itself, or llama's where it has windows."""
    if drafts == "no drafts":
        return {}
    how: dict[str, Any] = {"num_speculative_tokens": 3, "adaptive": False}
    if drafts == "n-gram":
        return {"speculative_config": how | {"method": "ngram", "prompt_lookup_min": 1}}
    own = "llama" if model in ("mistral", "gemma2", "gemma3") else model
    name = "demo-draft" if model == "demo" else model_options(own)["model"]
    return {"speculative_config": how | {"method": "draft_model", "model": name}}


# All six of the demo; of each family, in each weight format one kind of drafts, and so both.
CELLS = [("demo", weights, drafts) for weights in WEIGHTS for drafts in ("no drafts", "n-gram", "draft model")]
CELLS += [(family, *how) for family in FAMILIES for how in (("bf16", "n-gram"), ("int8", "draft model"))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("model", "weights", "drafts"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_answers_are_those_of_one_process(
    way: str,
    model: str,
    weights: str,
    drafts: str,
    model_options: Any,
    expected: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if way.startswith("Ray"):
        request.getfixturevalue("clusters")(2 if "two raylets" in way else 1)
    options = model_options(model) | WEIGHTS[weights] | changes_of(FULL, "") | {"num_kv_blocks": 12}
    options |= drafting(model, drafts, model_options) | ({"home": str(tmp_path)} if way == "torchrun" else {})
    ran = WAYS[way](options)
    for answers in ran.answers:
        assert answers == expected(model, weights)
    assert ran.stats.num_preemptions_total > 0, "nothing was preempted"
    assert ran.stats.prefix_cache_hits_total > 0, "no prefix was found again"
    assert ran.stats.num_forks_total > 0, "nothing was forked"
    spoken = ran.stats.speculation
    assert (spoken is not None and spoken.num_accepted_tokens > 0) == (drafts != "no drafts")


if __name__ == "__main__":  # a rank, for `on_torchrun`
    ran = on_engine(json.loads(sys.argv[1]))
    (Path(sys.argv[2]) / f"rank{os.environ['RANK']}").write_bytes(pickle.dumps(tuple(ran)))
