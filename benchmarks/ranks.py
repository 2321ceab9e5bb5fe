"""What sharing a model among processes costs on one machine: a gather against gloo's, and a token of a whole model.

    python benchmarks/ranks.py gather
    python benchmarks/ranks.py decode MODEL [--output-len 64] [--rounds 3]
    python benchmarks/ranks.py collectives MODEL [--output-len 64] [--rounds 3]

Two processes each. `gather` runs programs of nothing but gathers of bfloat16 columns. `decode` runs an engine with two
ranks of one thread each against one with two threads in the engine's process, by turns. `collectives` has two engines
with two ranks each take turns, which gather and reduce: time, and the workers' CPU time, with what they spin.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.distributed.groups import Group, segment_bytes
from quire.ops.gather import gather
from quire.ops.native.builder import ProgramBuilder
from quire.ops.native.library import Target, levels

SIZES = [(1, 1024), (32, 1024), (512, 1024)]
GATHERS = 100  # in one program


def median_us(function: Callable[[], object], count: int) -> float:
    taken: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        taken.append((time.perf_counter() - start) * 1e6)
    return sorted(taken)[count // 2]


def gather_rank(rank: int, path: str, report: Any) -> None:
    torch.set_num_threads(1)
    group = Group(path, rank, 2)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}.gloo", rank=rank, world_size=2)
    for rows, width in SIZES:
        builder = ProgramBuilder(torch.bfloat16, Target(levels()[0]))
        half = width // 2
        own: Any = builder.input(half)
        for _ in range(GATHERS - 1):
            gather(own, group, (0, half, width))  # all of them meet, the last one is the result
        program = builder.finish(gather(own, group, (0, half, width)))  # pyright: ignore[reportArgumentType]
        x, out = torch.zeros(rows, half, dtype=torch.bfloat16), torch.empty(rows, width, dtype=torch.bfloat16)
        ours = median_us(lambda p=program, x=x, out=out: p.run([x, out]), 60) / GATHERS
        parts = [torch.empty_like(x) for _ in range(2)]
        gloo = median_us(lambda parts=parts, x=x: torch.distributed.all_gather(parts, x), 600)
        if rank == 0:
            report.put((rows, width, ours, gloo))
    torch.distributed.destroy_process_group()


def decode(options: argparse.Namespace, num_ranks: int, report: Any) -> None:
    llm = LLM(
        options.model,
        tensor_parallel_size=num_ranks,
        show_progress=False,
        max_model_len=512,
        num_kv_blocks=200,
        skip_tokenizer_init=True,
    )
    seconds: list[float] = []
    for _ in range(2):
        for length in (1, 1 + options.output_len):
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": list(range(10, 42))}], params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
    report.put((seconds[3] - seconds[2]) / options.output_len * 1e3)


def cpu_seconds(llm: LLM) -> float:
    """Of the workers, so far."""
    total = 0
    for process in llm.llm_engine.executor.workers.processes:  # pyright: ignore
        words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def collectives(options: argparse.Namespace) -> None:
    shared: dict[str, Any] = {"tensor_parallel_size": 2, "max_model_len": 512, "num_kv_blocks": 200}
    llms = {
        kind: LLM(options.model, tp_collective=kind, show_progress=False, skip_tokenizer_init=True, **shared)
        for kind in ("gather", "reduce")
    }
    print("requests x tokens   gather: ms, CPU ms a step   reduce: ms, CPU ms a step")
    for _ in range(options.rounds):
        for count, num_prompt, num_tokens in ((1, 2, options.output_len), (16, 2, options.output_len), (1, 511, 1)):
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            told: list[str] = []
            for llm in llms.values():
                llm.reset_prefix_cache()
                cpu, start = cpu_seconds(llm), time.perf_counter()
                prompts: Any = [{"prompt_token_ids": list(range(10, 10 + num_prompt))}] * count
                llm.generate(prompts, params, use_tqdm=False)
                taken = time.perf_counter() - start, cpu_seconds(llm) - cpu
                told += [f"{seconds / num_tokens * 1e3:10.1f}" for seconds in taken]
            print(f"{count:3} x {num_prompt:3} + {num_tokens:<4}", *told)


def in_processes(function: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What the processes report, one for each tuple of arguments."""
    spawn = multiprocessing.get_context("spawn")
    report = spawn.Queue()
    processes = [spawn.Process(target=function, args=(*given, report)) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found: list[Any] = []
    while not report.empty():
        found.append(report.get())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gather", "decode", "collectives"])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.what == "gather":
        print("rows x columns   ours (us)   gloo (us)")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
            path = Path(home) / "group"
            path.write_bytes(bytes(segment_bytes(0)))
            for rows, width, ours, gloo in in_processes(gather_rank, [(0, str(path)), (1, str(path))]):
                print(f"{rows:4} x {width:<10} {ours:9.1f}   {gloo:9.1f}")
        return
    if options.what == "collectives":
        return collectives(options)
    for _ in range(options.rounds):
        [one] = in_processes(decode, [(options, 1)])
        [two] = in_processes(decode, [(options, 2)])
        print(f"ms a token: one rank of two threads {one:.2f}, two ranks of one thread {two:.2f}: {two / one:.3f}")


if __name__ == "__main__":
    main()
