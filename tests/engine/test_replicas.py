"""`LLM` with two engines, real ones: the answers of one, in order, whatever becomes of an engine."""

import os
import signal
import threading
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.entrypoints.replicated_core import ReplicatedCore

pytestmark = pytest.mark.slow

PROMPTS = [f"Number {number} said" for number in range(12)]
PARAMS = [SamplingParams(temperature=0.8, seed=i, n=1 + i % 2, max_tokens=12, logprobs=2) for i in range(12)]


def facts(outputs: list[Any]) -> list[Any]:
    return [[(part.text, part.token_ids, part.logprobs, part.stop_reason) for part in out.outputs] for out in outputs]


def test_the_answers_are_those_of_one_engine_though_one_of_two_dies() -> None:
    one, two = (LLM("demo", num_kv_blocks=256, data_parallel_size=size, seed=3) for size in (1, 2))
    core = two.llm_engine.core
    assert isinstance(core, ReplicatedCore)
    pids = [replica.client.pid for replica in core._client._replicas]
    expected = facts(one.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert facts(two.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    stats = two.get_metrics()
    assert stats.num_requests_running + stats.num_requests_waiting == 0
    assert stats.prefix_cache_queries_total == one.get_metrics().prefix_cache_queries_total
    assert two.pin_prefix("Once upon a time " * 20, "p").num_blocks > 0
    assert [pin.name for pin in two.pinned_prefixes()] == ["p"]
    assert two.unpin_prefix("p")
    assert two.reset_prefix_cache()

    os.kill(pids[0], signal.SIGSTOP)  # nothing that it is sent will begin
    timer = threading.Timer(0.2, os.kill, (pids[0], signal.SIGKILL))
    timer.start()
    assert facts(two.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    timer.join()
    assert core._client.states()[0].num_restarts == 1
    two.llm_engine.shutdown()  # while the first starts again
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
