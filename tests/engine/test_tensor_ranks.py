"""Two processes that share a model, each with an engine of its own that plans alike: tokens and logprobs of one rank.

The executor of processes has its own tests; here is only what a worker does as one of several ranks.
"""

import dataclasses
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.worker import WorkerConfig
from quire.distributed.groups import Group, GroupAbortedError, segment_bytes
from quire.engine import build
from quire.executor.inprocess import InProcessExecutor
from quire.ops.native.library import TORCH, levels

Found = list[tuple[list[int], Any]]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16, small chunks and few blocks": {"dtype": "bfloat16", "max_num_batched_tokens": 24, "num_kv_blocks": 40},
    "int8": {"quantization": "int8"},
    "torch": {"kernels": TORCH},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "draft model": {"speculative_config": {"model": "demo-draft", "num_speculative_tokens": 3}},
    "medusa": {"speculative_config": {"model": "demo-medusa", "method": "medusa", "num_speculative_tokens": 2}},
    "eagle": {"speculative_config": {"model": "demo-eagle", "method": "eagle", "num_speculative_tokens": 2}},
}
# What others do as well, within a rank or among several, is for nightly runs.
_NIGHTLY = ("int8", "ngram", "medusa")
PROMPTS = ["Once upon a time", "The ship had been at sea for", "Once upon a time there was", "A"]


def generate(options: dict[str, Any]) -> Found:
    llm = LLM("demo", show_progress=False, max_model_len=256, **options)
    params = [
        SamplingParams(max_tokens=20, temperature=0.8 * (i % 2), seed=i, logprobs=2, n=1 + i % 2, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(list(out.token_ids), out.logprobs) for request in outputs for out in request.outputs]


def run_rank(rank: int, path: str, options: dict[str, Any], results: Any) -> None:
    """The whole of a rank's process; `quire.executor` has what users get."""

    def select(config: WorkerConfig, _: Any) -> InProcessExecutor:
        return InProcessExecutor(dataclasses.replace(config, rank=rank, num_ranks=2, group=path))

    build.select_executor = select  # pyright: ignore[reportPrivateImportUsage]
    if options.pop("dies", None) == rank:
        Group(path, rank, 2).abort()
        os._exit(1)
    try:
        results.put((rank, generate(options)))
    except GroupAbortedError as error:
        results.put((rank, str(error)))


def on_two_ranks(home: Path, options: dict[str, Any], expected: int = 2) -> Sequence[Any]:
    path = home / "group"
    path.write_bytes(bytes(segment_bytes(8192)))
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    ranks = [spawn.Process(target=run_rank, args=(rank, str(path), options, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        return [found for _, found in sorted(results.get(timeout=120) for _ in range(expected))]
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in _NIGHTLY else ()) for name in OPTIONS]
)
def test_two_ranks_answer_as_one(tmp_path: Path, name: str) -> None:
    if name != "torch" and levels() == [TORCH]:
        pytest.skip("needs the compiled kernels")
    expected = generate(OPTIONS[name])
    assert on_two_ranks(tmp_path, OPTIONS[name]) == [expected, expected]


@pytest.mark.slow
def test_a_rank_that_is_gone_ends_the_other(tmp_path: Path) -> None:
    [found] = on_two_ranks(tmp_path, {"dies": 1}, expected=1)
    assert found.startswith("rank 0 of 2 stops")


def test_blocks_on_disk_are_refused(tmp_path: Path) -> None:
    from quire.config.engine_args import EngineArgs
    from quire.errors import ConfigError

    config = build.worker_config(EngineArgs("demo", kv_cache_dir=str(tmp_path)).resolve())
    with pytest.raises(ConfigError, match="kv_cache_dir: 2 ranks can't keep blocks there"):
        InProcessExecutor(dataclasses.replace(config, num_ranks=2)).start(progress=False)
