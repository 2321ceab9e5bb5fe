"""How a step's time grows with batch, context and model size, beside its floor: three plots, from `quire bench step`.

    python benchmarks/growth.py /path/to/qwen3-0.6b --models demo /path/to/larger ... --output-dir .

A point is the fastest of `--rounds` runs, which take turns with those of all other points, as a shared machine has
slow minutes. Each run measures the machine's limits, too: the floor is what the kernels must read and multiply at
least, at the rates of bare loops in the same run. `--models` are timed at batch 1 with weights in int4, and with random
weights where a folder has none. Times are those of a step that decodes.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.entrypoints.cli.svg import curve, document, text

BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (128, 512, 2048, 8192, 32768)
_STYLE = ".measured { stroke: #3a7bd5 } .floor { stroke: #9a9a9a; stroke-dasharray: 4 3 }"


@dataclass(frozen=True)
class Point:
    """Milliseconds of a step that decodes, and its floor."""

    at: float
    measured: float
    floor: float


def main() -> None:
    parser = argparse.ArgumentParser(description="How a step's time grows: three plots.")
    parser.add_argument("model")
    parser.add_argument("--models", nargs="*", default=[], help="of rising size")
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--contexts", nargs="*", type=int, default=CONTEXTS)
    parser.add_argument("--output-dir", type=Path, default=Path())
    parser.add_argument("--num-steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    def flags(batch: int, context: int) -> list[str]:
        length = context + args.num_steps + 2 + batch  # the first decode while the last begin
        own = ["--batch-size", batch, "--input-len", context, "--max-model-len", length, "--num-steps", args.num_steps]
        return [*map(str, own), "--enable-prefix-caching"]  # prompts are computed once a run, and not timed

    runs = [(args.model, batch, flags(batch, 128)) for batch in args.batches]
    runs += [(args.model, context, flags(1, context)) for context in args.contexts]
    runs += [(model, 0, [*flags(1, 128), *_whole(model)]) for model in args.models]
    rounds = [[point(*run) for run in runs] for _ in range(args.rounds)]
    every = [min(points, key=lambda one: one.measured) for points in zip(*rounds, strict=True)]
    batches, contexts = every[: len(args.batches)], every[len(args.batches) : len(runs) - len(args.models)]
    sizes = every[len(runs) - len(args.models) :]
    name = Path(args.model).name
    for file, title, unit, points in (
        ("growth_batch.svg", f"{name}: a step by its batch, contexts of 128", "sequences", batches),
        ("growth_context.svg", f"{name}: a step by its context, batch 1", "tokens of context", contexts),
        ("growth_size.svg", "a step by the model's size, batch 1, int4 weights", "MB read a step", sizes),
    ):
        if points:
            (args.output_dir / file).write_text(document(620, 400, title, _STYLE, list(_drawn(points, unit))))
            print(f"\n{title}")
            for one in points:
                share = one.floor / one.measured
                print(f"{one.at:10,.0f} {unit}: {one.measured:9.3f} ms, floor {one.floor:9.3f} ms: {share:.0%}")


def _whole(model: str) -> list[str]:
    own = ["--quantization", "int4"]
    if Path(model).is_dir() and not any(Path(model).glob("*.safetensors")):
        own += ["--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16"]
    return own


def point(model: str, at: float, flags: Sequence[str]) -> Point:
    """One run. `at` 0: the bytes that a step reads."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "figures.json"
        command = [sys.executable, "-m", "quire", "bench", "step", model, *flags, "--output-json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(file.read_text())
    limits, decoding = found["limits"], found["decoding"]
    num_bytes = sum(kernel["num_bytes"] for kernel in decoding["kernels"])
    shown = Point(
        at or num_bytes / 1e6,
        decoding["seconds"] * 1e3,
        sum(floor(kernel, limits) for kernel in decoding["kernels"]) * 1e3,
    )
    print(shown, file=sys.stderr, flush=True)
    return shown


def floor(kernel: dict[str, Any], limits: dict[str, float]) -> float:
    """Seconds that a kernel can't do without."""
    return max(kernel["num_bytes"] / limits["read"], kernel["operations"] / limits["multiply"])


def _drawn(points: Sequence[Point], unit: str) -> Iterator[str]:
    """Both axes are logarithmic."""
    lines = {"measured": [p.measured for p in points], "floor": [p.floor for p in points]}
    every = [value for line in lines.values() for value in line]
    x_of = _scale([p.at for p in points], 70, 580)
    y_of = _scale(every, 350, 70)
    for power in range(math.floor(math.log10(min(every))), math.ceil(math.log10(max(every))) + 1):
        if min(every) <= 10.0**power <= max(every):
            yield f'<path class="grid" d="M70 {y_of(10.0**power):.1f}h510"/>'
            yield text(62, y_of(10.0**power) + 4, f"{10.0**power:g} ms", "end")
    for one in points:
        yield text(x_of(one.at), 370, f"{one.at:,.0f}", "middle")
        yield text(x_of(one.at), y_of(one.measured) - 8, f"{one.measured:.3g}", "middle")
    yield text(325, 390, unit, "middle")
    for name, line in lines.items():
        yield curve([(x_of(p.at), y_of(value)) for p, value in zip(points, line, strict=True)], name)
    yield text(80, 60, "measured; below it, dashed, what this machine's limits leave", "start")


def _scale(values: Sequence[float], start: float, end: float) -> Any:
    low, high = math.log(min(values)), math.log(max(values))
    return lambda value: start + (end - start) * (math.log(value) - low) / ((high - low) or 1)


if __name__ == "__main__":
    main()
