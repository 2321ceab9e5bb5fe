"""Speed of linear against what this machine can do: python benchmarks/linear.py [N K] [--busy] [--types T ...]

For each number of rows and each weight format: milliseconds, GB/s of weights and TFLOP/s, best of several passes over
different copies of the weights (more than any cache holds). The machine's own limits are measured in the same minutes:
a pure read of the same memory, and torch's product of the same shape in bf16. Where others use the machine, --busy
takes the processor time of one thread, and the best four products of a second.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quire import ops
from quire.ops.native import builder
from quire.ops.native.library import Target, default_target
from quire.ops.native.matrix import PackedMatrix, row_bytes, weight_format, weight_order
from quire.ops.native.program import Program
from quire.ops.native.structs import Type
from quire.worker.pages import huge_pages

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
TOTAL_BYTES = 1 << 30  # of all copies together
TORCH_BYTES = 1 << 28


def best_seconds(products: list[Callable[[], object]], busy: bool, passes: int = 4) -> float:
    """Seconds of one product: the best mean over a pass through all copies or, `busy`, the best of some at a time."""
    best = float("inf")
    if busy:
        end, turn = time.perf_counter() + 1, itertools.cycle(products)
        while time.perf_counter() < end:
            few = list(itertools.islice(turn, 4))
            start = time.thread_time()
            for product in few:
                product()
            best = min(best, (time.thread_time() - start) / len(few))
        return best
    for _ in range(passes):
        start = time.perf_counter()
        for product in products:
            product()
        best = min(best, (time.perf_counter() - start) / len(products))
    return best


def torch_products(rows: int, cols: int, x: torch.Tensor) -> list[Callable[[], object]]:
    """The same work as torch does it, with as many copies of the weights as the caches don't hold."""
    weights = [torch.randn(rows, cols).bfloat16() * 0.02 for _ in range(max(2, TORCH_BYTES // (2 * rows * cols)))]
    return [partial(torch.nn.functional.linear, x, weight) for weight in weights]


def activations(num_rows: int, width: int) -> torch.Tensor:
    """Zeros, in rows as far apart as a program's own: never by a page, which would have them share lines of L1."""
    return torch.zeros(num_rows, width + 32 * (width * 2 % 4096 == 0), dtype=torch.bfloat16)[:, :width]


def packed_copies(rows: int, cols: int, type: Type, paired: bool) -> list[PackedMatrix]:
    """Enough copies of one random matrix to fill TOTAL_BYTES."""
    shape, made_of = PackedMatrix.data_shape(rows, cols, type), weight_format(type)
    scales = torch.zeros(rows) if made_of.has_scales else None
    first = PackedMatrix(huge_pages(shape, torch.uint8), scales, rows, cols, type, paired)
    if not made_of.block_values:
        first.pack(torch.randn(rows, cols) * 0.02, 0)
    else:  # bytes below that of the first f16 that is no number
        first.pack(torch.randint(0, 0x70, (rows, row_bytes(type, cols)), dtype=torch.uint8), 0)
    copies = [first]
    for _ in range(TOTAL_BYTES // first.data.numel() - 1):
        data = huge_pages(shape, torch.uint8)
        data.copy_(first.data)
        copies.append(PackedMatrix(data, scales, rows, cols, type, paired))
    return copies


def recorded(matrix: PackedMatrix, target: Target) -> Program:
    """One product as a program."""
    making = builder.ProgramBuilder(torch.bfloat16, target)
    product: Any = ops.linear(builder.recorded(making.input(matrix.cols)), matrix)
    return making.finish(product)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="*", type=int, default=[8192, 2048], help="output and input features")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--busy", action="store_true", help="one thread's processor time, where others use the machine")
    parser.add_argument(
        "--types",
        nargs="*",
        default=["BF16", "I8", "I4"],
        choices=[type.name for type in Type][1:],
    )
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--plain", action="store_true", help="weights as they are named, in no level's own order")
    args = parser.parse_args()
    rows, cols = args.shape
    if args.busy:
        args.threads = 1
    torch.set_num_threads(args.threads)
    target = Target(default_target().level, args.threads)
    torch.manual_seed(0)
    print(f"[{rows} x {cols}], {args.threads} threads, level {target.level}")
    for given in (Type[name] for name in args.types):
        type, paired, _ = (given, False, 0) if args.plain else weight_order(target.level, given)
        copies = packed_copies(rows, cols, type, paired)
        num_bytes = copies[0].data.numel()
        start = time.perf_counter()
        for copy in copies:
            copy.data.view(-1).view(torch.int64).sum()
        read = num_bytes * len(copies) / (time.perf_counter() - start) / 1e9
        programs = [recorded(copy, target) for copy in copies]
        name = given.name if type is given else f"{given.name}, kept as {type.name}"
        print(f"{name}: {num_bytes / 1e6:.1f} MB; torch sums the same memory at {read:.1f} GB/s")
        for m in args.rows:
            x, out = activations(m, cols).copy_(torch.randn(m, cols)), activations(m, rows)
            few = programs if m <= 64 else programs[: max(2, len(programs) * 64 // m)]
            seconds = best_seconds([partial(program.run, [x, out]) for program in few], args.busy)
            beside = best_seconds(torch_products(rows, cols, x), args.busy) if given is Type.BF16 else None
            print(
                f"  M = {m:4}  {seconds * 1e3:7.3f} ms  {num_bytes / seconds / 1e9:5.1f} GB/s  "
                f"{2 * m * rows * cols / seconds / 1e12:5.3f} TFLOP/s"
                + (f"  torch {2 * m * rows * cols / beside / 1e12:5.3f}" if beside else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
