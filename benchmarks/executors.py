"""What a step costs more where workers are processes: the demo, one request, in this process and in others.

    python benchmarks/executors.py [--tokens 400] [--rounds 7]

Prints the least time of a step (us) for each executor, and the CPU time that an idle worker takes.
"""

import argparse
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.executor.processes import Processes
from quire.executor.remote import RemoteExecutor

WAYS: dict[str, dict[str, Any]] = {
    "in-process": {},
    "mp": {"distributed_executor_backend": "mp"},
    "mp, 2 ranks": {"tensor_parallel_size": 2},
    "mp, 2 stages": {"pipeline_parallel_size": 2},
    "Ray": {"distributed_executor_backend": "ray"},
    "Ray, 2 ranks": {"distributed_executor_backend": "ray", "tensor_parallel_size": 2},
    "Ray, 2 stages": {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2},
}


def step_seconds(llm: LLM, num_tokens: int, rounds: int) -> float:
    """Seconds of a step of one sequence: the least mean of some rounds."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        llm.generate("Once upon a time", params, use_tqdm=False)
        taken.append((time.perf_counter() - start) / num_tokens)
    return min(taken)


def cpu_ticks(pid: int) -> int:
    """CPU time of a process, in the kernel's ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    base = 0.0
    for name, options in WAYS.items():
        if "Ray" in name and find_spec("ray") is None:
            continue
        llm = LLM(model="demo", num_kv_blocks=512, **options)
        seconds = step_seconds(llm, given.tokens, given.rounds)
        base = base or seconds
        print(f"{name:13s} {seconds * 1e6:7.0f} us a step, {(seconds - base) * 1e6:+5.0f} us")
        executor = llm.llm_engine.executor
        if isinstance(executor, RemoteExecutor) and isinstance(executor.workers, Processes):
            pids = [process.pid for process in executor.workers.processes]
            before = sum(map(cpu_ticks, pids))
            time.sleep(3)
            print(f"{'':13s} idle: {(sum(map(cpu_ticks, pids)) - before) / 3:.1f} % of a core")
        llm.llm_engine.shutdown()


if __name__ == "__main__":
    main()
