"""Each of the peers' workloads beside its floor: what its steps must read and multiply, at rates of bare loops.

    python benchmarks/floors.py PEERS MODEL_DIR [KEY=VALUE ...]                     # WORKLOADS=chats64,p8192 chooses
    python benchmarks/floors.py PEERS MODEL_DIR quantization='"int8"' max_model_len=33000

PEERS is the folder of `workloads.py`; its workloads come first, then those of `more_workloads.py` that WORKLOADS names.
All steps that the engine took count, each by itself, as in `quire bench step`: bytes of weights, and of keys and values
(blocks that sequences share once), and operations of products and of attention. Bare loops are timed between steps,
each second or so (which the workload's time leaves out), and a step's floor is of the two that are nearest to it:
machines shared with others change theirs within seconds. What is not a kernel has no floor, nor have a mixture's
experts: plans don't say which are chosen.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from more_workloads import more_workloads

from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.entrypoints.cli.bench_step import Limits, Work, kernels_of, keys_seen, measure_limits, native_model
from quire.models.compiled import CompiledModel
from quire.protocol.step import StepPlan

_SECONDS_BETWEEN = 1.0


@dataclass
class Break:
    """Bare loops between two steps: before which step, what they reached, how long they took, when they ended."""

    step: int
    limits: Limits
    spent: float = 0
    end: float = field(default_factory=time.perf_counter)

    @classmethod
    def now(cls, step: int, model: CompiledModel) -> "Break":
        start = time.perf_counter()
        limits = measure_limits(model, rounds=2)
        return cls(step, limits, time.perf_counter() - start)


def _spread(rates: Iterator[float]) -> str:
    """The least and the most of them."""
    found = sorted(map(round, rates))
    return f"{found[0]}..{found[-1]}"


@dataclass
class Sequence:
    """What a plan's diffs say of a sequence so far."""

    num_computed: int
    blocks: list[int]


@dataclass
class Steps:
    """The work of each step, from the plans that an executor is given. One KV group stands for all."""

    block_size: int
    sequences: dict[int, Sequence] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)

    def see(self, plan: StepPlan) -> None:
        for new in plan.new_sequences:
            self.sequences[new.sequence_id] = Sequence(new.num_computed_tokens, list(new.block_ids[0]))
        spans, blocks = [], set[int]()
        for one in plan.scheduled:
            sequence = self.sequences[one.sequence_id]
            sequence.blocks += one.new_block_ids[0] if one.new_block_ids else []
            start, sequence.num_computed = sequence.num_computed, sequence.num_computed + one.num_new_tokens
            spans.append((start, sequence.num_computed))
            blocks.update(sequence.blocks[: -(-sequence.num_computed // self.block_size)])
        shared = sum(-(-end // self.block_size) for _, end in spans) - len(blocks)

        def seen(window: float) -> float:
            return sum(keys_seen(end, window) - keys_seen(start, window) for start, end in spans)

        def read(window: float) -> float:
            return sum(min(window, end) for _, end in spans) - shared * self.block_size

        self.works.append(Work(1, plan.num_tokens, seen, read))


def chosen(peers: Path) -> Iterator[tuple[str, list[list[int]], list[int]]]:
    """The workloads asked for: (name, prompts of token ids, tokens to generate)."""
    sys.path.insert(0, str(peers))
    from workloads import workloads  # pyright: ignore[reportMissingImports]

    names = os.environ.get("WORKLOADS")
    if names is None:
        yield from workloads()
    else:
        every = {one[0]: one for one in chain(workloads(), more_workloads())}
        yield from (every[name] for name in ["warm", *names.split(",")])


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    peers, model_dir, *pairs = sys.argv[1:]
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 64}
    options |= {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in pairs)}
    llm = LLM(model_dir, **options)
    core, model = llm.llm_engine.core, native_model(llm)
    assert isinstance(core, EngineCore)
    submit = core.executor.submit
    for name, prompts, lengths in chosen(Path(peers)):
        steps, spent, breaks = Steps(core.scheduler.kv.block_size), [], [Break(0, measure_limits(model))]

        def watched(
            plan: StepPlan, steps: Steps = steps, spent: list[Any] = spent, breaks: list[Break] = breaks
        ) -> None:
            spent.append(model.spent())  # by the step before
            if time.perf_counter() > breaks[-1].end + _SECONDS_BETWEEN:
                breaks.append(Break.now(len(steps.works), model))
            steps.see(plan)
            submit(plan)

        core.executor.submit = watched
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start - sum(one.spent for one in breaks)
        breaks.append(Break.now(len(steps.works), model))
        own = zip([*spent[1:], model.spent()], steps.works, strict=True)
        kernels = [kernels_of(llm, each, work, model.target.level) for each, work in own]
        floor = 0.0
        for before, after in pairwise(breaks):
            limits = Limits(*map(fmean, zip(astuple(before.limits), astuple(after.limits), strict=True)))
            floor += sum(kernel.floor(limits) for step in kernels[before.step : after.step] for kernel in step)
        figures = {"name": name, "sec": round(seconds, 3), "floor": round(floor, 3), "share": round(floor / seconds, 3)}
        figures |= {"steps": len(steps.works), "read_GB_s": _spread(one.limits.read / 1e9 for one in breaks)}
        print(json.dumps(figures | {"GFLOP_s": _spread(one.limits.multiply / 1e9 for one in breaks)}), flush=True)


if __name__ == "__main__":
    main()
