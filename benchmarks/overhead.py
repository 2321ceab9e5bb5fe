"""What a step costs beside the kernels, stage by stage.

    python benchmarks/overhead.py [MODEL] [--batch-sizes 1 64] [--output delta] [--rounds 5] [--beside TREE]

Microseconds of processor time of the engine's thread, pinned to a core: the median of steps in which so many sequences
decode (blocks are given out in every 16th of a sequence), and of rounds the median, each a process of its own. What the
timers cost is measured first and taken off. With `--beside` each round is run once with the code of another checkout,
and once with this one's, in turn. `LLMEngine` is timed as it stands: nothing is left out, and the last line says what
is in none of the stages. On a machine that is busy only figures of one run can be compared.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

STAGES = {
    "schedule": "schedule",
    "begin": "rows, gather, tensors",
    "finish": "sampling and results",
    "update": "update",
    "process": "text and outputs",
    "model": "calls of the model, without kernels",
    "kernels": "kernels: layers, head, sampler",
    "step": "the loop around all these",
}
BESIDE = ("model", "kernels", "step")  # not of the sum
NUM_STEPS, NUM_PROMPT_TOKENS, NUM_CALIBRATED = 160, 64, 20_000


class Clock:
    """Times of nested calls, each without those that it makes."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)  # ns, of the step under way
        self.inner = self.outer = 0.0  # ns that a timed call costs itself, and its caller
        self._inside: list[float] = [0.0]  # by depth: ns of the calls made there

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its times counted."""
        now, inside, spent = time.thread_time_ns, self._inside, self.spent

        def call(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            start = now()
            try:
                return function(*args, **kwargs)
            finally:
                took = now() - start
                spent[stage] += took - inside.pop() - self.inner
                inside[-1] += took + self.outer

        return call

    def calibrate(self) -> None:
        """Find what a timed call costs."""
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        timed = self.timed("", nothing)
        ways: dict[Callable[[], None], list[float]] = {nothing: [], timed: []}
        own: list[float] = []
        for _ in range(5):
            for function, found in ways.items():
                self.spent.clear()
                start = time.thread_time_ns()
                for _ in range(NUM_CALIBRATED):
                    function()
                found.append((time.thread_time_ns() - start) / NUM_CALIBRATED)
            own.append(self.spent[""] / NUM_CALIBRATED)
        self.inner = median(own)
        self.outer = max(0.0, median(ways[timed]) - median(ways[nothing]) - self.inner)
        self.spent.clear()


def measure(model: str, batch_size: int, output: str) -> dict[str, float]:
    """Medians of the stages of steps in which so many sequences decode, in us."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from quire.config.engine_args import EngineArgs
    from quire.engine.llm_engine import LLMEngine
    from quire.engine.output_processor import OutputProcessor, RequestRecord
    from quire.models.compiled import CompiledModel
    from quire.ops.native.library import loaded_library
    from quire.sampling_params import RequestOutputKind, SamplingParams
    from quire.scheduler.scheduler import Scheduler
    from quire.worker.worker import Worker

    engine = LLMEngine.from_engine_args(EngineArgs(model=model, max_num_seqs=batch_size), show_progress=False)
    clock, library = Clock(), loaded_library()
    clock.calibrate()
    places: list[tuple[Any, str, str]] = [
        (Scheduler, "schedule", "schedule"),
        (Worker, "begin", "begin"),
        (Worker, "finish", "finish"),
        (Scheduler, "update", "update"),
        (OutputProcessor, "process", "process"),
        (RequestRecord, "output", "process"),
        (CompiledModel, "__call__", "model"),
        (CompiledModel, "compute_logits", "model"),
        (library, "quire_program_run", "kernels"),
        (library, "quire_sample", "kernels"),
    ]
    for owner, name, stage in places:
        setattr(owner, name, clock.timed(stage, getattr(owner, name)))
    kind, seeds = RequestOutputKind[output.upper()], range(batch_size)
    params = [SamplingParams(seed=i, max_tokens=NUM_STEPS, ignore_eos=True, output_kind=kind) for i in seeds]
    for i, own in enumerate(params):
        prompt = [20 + (31 * i + 7 * place) % 900 for place in range(NUM_PROMPT_TOKENS + i % 16)]
        engine.add_request(str(i), {"prompt_token_ids": prompt}, own)
    step, found = clock.timed("step", engine.step), []
    while engine.has_unfinished_requests():
        clock.spent.clear()
        step()
        found.append(dict(clock.spent))
    steps = found[len(found) - NUM_STEPS + 16 : -16]
    return {stage: median(one.get(stage, 0.0) for one in steps) / 1000 for stage in STAGES}


def run(args: argparse.Namespace, tree: Path, batch_size: int) -> dict[str, float]:
    """The same in a process of its own, of a checkout's code."""
    given = [args.model, "--output", args.output, "--batch-sizes", str(batch_size), "--child"]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "PASSIVE"}
    told = subprocess.run([sys.executable, __file__, *given], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(told.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--output", default="cumulative", choices=["cumulative", "delta", "final_only"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.model, args.batch_sizes[0], args.output)))
        return
    trees = [tree.resolve() for tree in (args.beside, Path(__file__).parents[1]) if tree is not None]
    columns: list[dict[str, float]] = []
    for batch_size in args.batch_sizes:
        rounds = [[run(args, tree, batch_size) for tree in trees] for _ in range(args.rounds)]
        for of_tree in zip(*rounds, strict=True):
            columns.append({stage: median(one[stage] for one in of_tree) for stage in STAGES})
    names = ["before", "now"] if args.beside else ["now"]
    print(f"{'us':36}" + "".join(f"{f'{size}, {name}':>13}" for size in args.batch_sizes for name in names))
    for stage, name in STAGES.items():
        if stage == BESIDE[0]:
            sums = [sum(time for stage, time in column.items() if stage not in BESIDE) for column in columns]
            print(f"{'the sum of these':36}" + "".join(f"{total:13.1f}" for total in sums))
        print(f"{name:36}" + "".join(f"{column[stage]:13.1f}" for column in columns))


if __name__ == "__main__":
    main()
