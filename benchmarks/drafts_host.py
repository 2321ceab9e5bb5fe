"""What drafts cost the host: the time of a decode step with the model's kernels left out, by number of drafts.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/drafts_host.py --batch-sizes 1 8 --repeat 30

Logits always choose token 0, and the sampler's own kernel is not counted either: what remains is Python and numpy of
scheduler, worker and output. A tenth of the steps took less than what is told, so that a busy machine shows little.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.ops.native.library import loaded_library
from quire.speculative.base import DraftedSequence, Proposer

NUM_DRAFTS = (1, 2, 4, 8, 16)
NUM_STEPS = 24


class Fixed(Proposer):
    """Always the same drafts."""

    def __init__(self, max_drafts: int, token_id: int) -> None:
        self.max_drafts = max_drafts
        self._drafts = [token_id] * max_drafts

    def propose(self, rows: Sequence[DraftedSequence], hidden: Tensor) -> Sequence[Sequence[int]]:
        return [self._drafts[: row.max_drafts] for row in rows]


class Kernels:
    """The library, without the model's programs, and with a clock at the sampler's."""

    def __init__(self) -> None:
        self._library = loaded_library()
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def quire_program_run(self, *_: Any) -> int:
        return 0

    def quire_sample(self, *arguments: Any) -> int:
        start = time.perf_counter()
        found = self._library.quire_sample(*arguments)
        self.seconds += time.perf_counter() - start
        return found


def engine_of(num_drafts: int, token_id: int) -> Any:
    config = {"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False} if num_drafts else None
    engine = LLM("demo", show_progress=False, enable_prefix_caching=False, speculative_config=config).llm_engine
    runner: Any = engine.executor.worker.runner
    if num_drafts:
        runner.speculation.proposer = Fixed(num_drafts, token_id)
    size = runner.model.vocab_size
    chosen = torch.zeros(1024, size).index_fill_(1, torch.tensor([0]), 1.0)
    runner.model.compute_logits = lambda hidden: chosen[: hidden.shape[0]]
    return engine


def step_seconds(engine: Any, kernels: Kernels, batch_size: int, num_tokens: int) -> list[float]:
    """Of the steps after the first few."""
    for i in range(batch_size):
        params = SamplingParams(temperature=0, max_tokens=num_tokens * (NUM_STEPS + 2), ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": list(range(10, 74))}, params)
    found: list[float] = []
    for _ in range(NUM_STEPS):
        kernels.seconds, start = 0.0, time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - start - kernels.seconds)
    engine.abort_request([str(i) for i in range(batch_size)])
    while engine.has_unfinished_requests():
        engine.step()
    return found[5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeat", type=int, default=30)
    options = parser.parse_args()
    ways = [(0, 1), *((k, token_id) for token_id in (1, 0) for k in NUM_DRAFTS)]
    kernels = Kernels()
    with mock.patch("quire.sampling.native.loaded_library", return_value=kernels):
        engines = {way: engine_of(*way) for way in ways}
        for engine in engines.values():
            engine.executor.worker.runner.model._body._library = kernels
        gc.disable()
        for batch_size in options.batch_sizes:
            seconds: dict[tuple[int, int], list[float]] = {way: [] for way in ways}
            for _ in range(options.repeat):
                for (k, token_id), engine in engines.items():
                    num_tokens = 1 if token_id else k + 1
                    seconds[k, token_id] += step_seconds(engine, kernels, batch_size, num_tokens)
            told = {way: 1e6 * sorted(each)[len(each) // 10] for way, each in seconds.items()}
            print(f"batch {batch_size}: {told[0, 1]:.1f} us a step without drafts")
            for token_id, what in ((1, "refused"), (0, "accepted")):
                first, most = told[1, token_id], told[NUM_DRAFTS[-1], token_id]
                each = ", ".join(f"{k}: {told[k, token_id]:.1f}" for k in NUM_DRAFTS)
                slope = (most - first) / (NUM_DRAFTS[-1] - 1) / batch_size
                print(f"  drafts, all {what}: {each}; {slope:.2f} us for each draft beyond the first")


if __name__ == "__main__":
    main()
