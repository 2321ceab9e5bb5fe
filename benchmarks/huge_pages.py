"""What weights in small pages cost a decode: python benchmarks/huge_pages.py MODEL [--batch-size 1 8]

Starts the model from its packed weights again and again, after the system has read them page by page: in turn they stay
there, as in a start that is told to settle at once, and move to huge pages (csrc/huge_pages.cpp). Prints the
milliseconds of a step of each. Linux, and a model whose weights are kept in ~/.cache/quire: start it once before.
"""

import argparse
import mmap
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

PROMPT, STEPS, ROUNDS = 32, 32, 5


def packed_file() -> Path | None:
    """The file of weights that is mapped."""
    found = re.search(r"/\S+/quire/packed/\S+\.bin", Path("/proc/self/maps").read_text())
    return Path(found[0]) if found else None


def read_by_pages(path: Path) -> None:
    """Have the system forget a file, and read it in pages of 4 KB."""
    file = os.open(path, os.O_RDONLY)
    for advice in (os.POSIX_FADV_DONTNEED, os.POSIX_FADV_RANDOM):
        os.posix_fadvise(file, 0, 0, advice)
    for offset in range(0, os.fstat(file).st_size, mmap.PAGESIZE):
        os.pread(file, 1, offset)
    os.close(file)


def measure(args: argparse.Namespace) -> None:
    llm = LLM(args.model, quantization=args.quantization, show_progress=False)
    if args.stay:
        llm.apply_model(lambda model: None)  # which may write to the weights: they settle
    path = packed_file()
    if path is None:
        sys.exit("its packed weights are not mapped: start it once, and let that write them")
    print(path)
    time.sleep(args.seconds)  # while nothing is computed, they move at once

    def seconds(batch: int, num_tokens: int) -> float:
        prompts: Any = [{"prompt_token_ids": [(37 * i + 11 * j) % 500 for j in range(PROMPT)]} for i in range(batch)]
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - start

    for batch in args.batch_size:
        seconds(batch, 2)
        each = [(seconds(batch, STEPS + 1) - seconds(batch, 1)) / STEPS for _ in range(ROUNDS)]
        print(batch, statistics.median(each) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5, help="between a start and what is measured")
    parser.add_argument("--stay", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        return measure(args)
    command = [sys.executable, *sys.argv, "--once"]

    def start(*how: str) -> tuple[Path, list[str]]:
        path, *lines = subprocess.run(
            [*command, *how], stdout=subprocess.PIPE, text=True, check=True
        ).stdout.splitlines()
        return Path(path), [f"{batch} sequences {float(ms):.2f} ms" for batch, ms in map(str.split, lines)]

    path, _ = start("--batch-size", "1")
    for _ in range(args.rounds):
        for kind, how in (("stay", ["--stay"]), ("move", [])):
            read_by_pages(path)
            print(f"{kind}: {', '.join(start(*how)[1])}", flush=True)


if __name__ == "__main__":
    main()
