"""What the scheduler costs: microseconds of CPU time a step and a scheduled decode, at many running and waiting.

    python benchmarks/scheduler.py [--profile] [--running 16 128 1024 8192] [--waiting 0 1000 100000]

The best of several rounds, with results made up beforehand: nothing but `Scheduler.schedule` and `Scheduler.update`
is timed. A round's steps are enough for every sequence to fill blocks and to be given new ones.
"""

import argparse
import cProfile
import gc
import pstats
import time

from quire.config.scheduler import SchedulerConfig
from quire.kvcache.manager import KVManager
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import SequenceResult, StepPlan, StepResult
from quire.sampling_params import SamplingParams
from quire.scheduler.policies.registry import POLICIES
from quire.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 40
MAX_MODEL_LEN = 4_096


def make_scheduler(num_running: int, num_waiting: int, num_steps: int, policy: str = "fcfs") -> Scheduler:
    """A scheduler with so many sequences that decode, and so many that wait for a place; blocks for so many steps."""
    blocks_each = (NUM_PROMPT_TOKENS + num_steps) // BLOCK_SIZE + 2
    layout = CacheLayout(
        block_size=BLOCK_SIZE,
        groups=[CacheGroup([0])],
        num_blocks=[num_running * blocks_each + 1_024],
        max_model_len=MAX_MODEL_LEN,
    )
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2 * num_running, 8_192),
        policy=policy,
    )
    scheduler = Scheduler(config, KVManager(layout))
    params = SamplingParams(max_tokens=MAX_MODEL_LEN)
    for number in range(num_running + num_waiting):
        task = SamplingTask(
            params=params, max_tokens=MAX_MODEL_LEN, stop_token_ids=frozenset({2}), eos_token_id=2, seed=1
        )
        prompt = [number] * NUM_PROMPT_TOKENS
        scheduler.add(NewRequest(request_id=str(number), prompt_token_ids=prompt, task=task, client=str(number)), 0.0)
    while True:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(plan, results_of(plan), 0.0)
        if len(plan.scheduled) == num_running and plan.num_tokens == num_running:
            return scheduler


def results_of(plan: StepPlan) -> StepResult:
    """What a worker might have drawn."""
    return StepResult(
        step_id=plan.step_id,
        results=[SequenceResult([7]) if item.sampling else SequenceResult() for item in plan.scheduled],
    )


def measure(scheduler: Scheduler, num_steps: int) -> tuple[float, float]:
    """Seconds of CPU time of a step: schedule, update."""
    clock = time.thread_time
    planning = updating = 0.0
    for _ in range(num_steps):
        start = clock()
        plan = scheduler.schedule(0.0)
        planned = clock()
        assert plan is not None
        result = results_of(plan)
        before = clock()
        scheduler.update(plan, result, 0.0)
        updating += clock() - before
        planning += planned - start
    return planning / num_steps, updating / num_steps


def main() -> None:
    """Print a line for each number of running and waiting sequences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 128, 1_024, 8_192])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1_000, 100_000])
    parser.add_argument("--policy", choices=list(POLICIES), default="fcfs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print("running  waiting  schedule us  update us  us a decode")
    for num_running in args.running:
        for num_waiting in args.waiting:
            num_steps = max(2 * BLOCK_SIZE, min(1_024 // num_running, 8) * 2 * BLOCK_SIZE)
            scheduler = make_scheduler(num_running, num_waiting, (args.rounds + 1) * num_steps, args.policy)
            gc.collect()
            gc.freeze()  # as an engine does once it is built
            rounds = [measure(scheduler, num_steps) for _ in range(args.rounds)]
            planning, updating = min(rounds, key=sum)
            each = (planning + updating) / num_running * 1e6
            times = f"{planning * 1e6:12.1f} {updating * 1e6:10.1f} {each:12.2f}"
            print(f"{num_running:7,} {num_waiting:8,} {times}", flush=True)
            if args.profile and num_waiting == args.waiting[0]:
                profile = cProfile.Profile()
                profile.runcall(measure, scheduler, num_steps)
                pstats.Stats(profile).sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
