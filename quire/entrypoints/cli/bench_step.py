"""`quire bench step`: where the time of a step goes, kernel by kernel, beside what this machine reaches in bare loops.

What a kernel must read and multiply at least follows from the model's program and the batch; the machine's limits are
measured in the same run (csrc/limits.h). A kernel's floor is the longer of the two times that they make; its share of
the limit is the floor over the time that it took. Weights that lie in a cache may be read faster than memory is.
"""

import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli.files import OutputFile, write_figures, write_text
from quire.entrypoints.cli.flags import add_counts, add_engine_flags
from quire.entrypoints.cli.session import load, random_prompts
from quire.entrypoints.cli.svg import axis, document, text
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.entrypoints.llm import LLM
    from quire.models.compiled import CompiledModel
    from quire.ops.native.program import Spent

_Spents = list["Spent"]
_Timed = tuple[float, int, tuple[_Spents, _Spents], float]
_READ_BYTES = 1 << 28  # that no cache holds
_MULTIPLY_ROUNDS = 1 << 20
_COLOURS = {"memory": "#3a7bd5", "multiplication": "#3aa76d", "neither": "#9a9a9a"}


@dataclass(frozen=True)
class Limits:
    """What the machine reaches: bytes it reads a second, and operations of its kernels' fastest products.

    Attributes:
        multiply_bytes: where weights and x both are codes of eight bits.
        multiply_floats: of float32 models, and of attention where a level has no products for bfloat16.
    """

    read: float
    multiply: float
    multiply_bytes: float
    multiply_floats: float


@dataclass
class Kernel:
    """Kernels of one kind in a step: what they must read (bytes) and multiply (operations) at least, and their time.

    Attributes:
        rounds_x: they multiply bytes, of so many an activation is made, or in the time of so many; 0: they don't.
        floats: they multiply floats.
    """

    name: str
    calls: float = 0
    seconds: float = 0
    num_bytes: float = 0
    operations: float = 0
    rounds_x: int = 0
    floats: bool = False

    def floor(self, limits: Limits) -> float:
        """Seconds that a step can't do without."""
        rate = limits.multiply_floats if self.floats else limits.multiply
        rate = limits.multiply_bytes / self.rounds_x if self.rounds_x else rate
        return max(self.num_bytes / limits.read, self.operations / rate)

    def bound(self, limits: Limits) -> str:
        """What the floor is made of."""
        if not self.num_bytes + self.operations:
            return "neither"
        return "memory" if self.floor(limits) == self.num_bytes / limits.read else "multiplication"


_Table = tuple[str, float, float, list[Kernel]]  # title; of a step its seconds, tokens and kernels


@dataclass(frozen=True)
class Work:
    """What a step was asked for, of so many that were timed.

    Attributes:
        seen: keys that tokens meet, summed over tokens, at most `window` each.
        read: keys of sequences, summed over sequences, likewise.
    """

    num_steps: int
    num_tokens: float
    seen: Callable[[float], float]
    read: Callable[[float], float]


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire bench step`."""
    add_counts(parser, ("--batch-size", 8, "sequences"), ("--input-len", 256, "tokens of each prompt"))
    add_counts(parser, ("--num-steps", 32, "steps that are timed of those that decode"))
    shared = "tokens that all prompts begin with, from the prefix cache: decoding alone is shown then (default: 0)"
    parser.add_argument("--shared-len", type=int, default=0, metavar="N", help=shared)
    parser.add_argument("--plot", type=OutputFile, metavar="FILE", help="draw the times and floors to this SVG file")
    parser.add_argument("--output-json", type=OutputFile, metavar="FILE", help="write the figures to this file, too")
    add_engine_flags(parser, {"enable_prefix_caching": False})


def run(namespace: Namespace) -> None:
    """Measure prompts and decoding, and print a table of each."""
    size, length, steps, shared = namespace.batch_size, namespace.input_len, namespace.num_steps, namespace.shared_len
    if not 0 <= shared <= length:
        raise ConfigError(f"--shared-len must be from 0 to --input-len = {length}; it is {shared}.")
    namespace.enable_prefix_caching |= shared > 0
    vars(namespace).setdefault("max_num_seqs", max(size, EngineArgs.max_num_seqs))
    llm, _ = load(namespace)
    model = native_model(llm)
    before = measure_limits(model)
    prompts = random_prompts(llm, size, length)
    for prompt in prompts:
        prompt["prompt_token_ids"][:shared] = prompts[0]["prompt_token_ids"][:shared]
    _steps(llm, model, prompts, steps)  # once untimed, which touches all of the cache that is met below
    tables: dict[str, _Table] = {}
    for phase, most in (("prompts", 0), ("decoding", steps)):
        seconds, num_steps, spent, made = _steps(llm, model, prompts, most)
        if phase == "prompts":
            if namespace.enable_prefix_caching:
                continue  # they were computed above
            title = f"prompts: {size} of {length} tokens in {num_steps} steps; of one step"
            work = Work(num_steps, size * length / num_steps, *_prompt_keys(size, length, num_steps))
        else:
            common = f", {shared} of them common" * (shared > 0)
            title = f"decoding: {size} sequences of {length + made:g} tokens{common}; of one step"
            work = Work(num_steps, size, *_decoding_keys(size, length + made, shared))
        tables[phase] = title, seconds / num_steps, work.num_tokens, kernels_of(llm, spent, work, model.target.level)
    # The better of two, as a machine's clock and neighbours change within a run.
    limits = Limits(*map(max, astuple(before), astuple(measure_limits(model))))
    print(f"{model.target.level}, {model.target.num_threads} threads: reads {limits.read / 1e9:.1f} GB/s, ", end="")
    others = f"(bytes {limits.multiply_bytes / 1e9:,.0f}, floats {limits.multiply_floats / 1e9:,.0f})"
    print(f"multiplies {limits.multiply / 1e9:,.0f} GFLOP/s {others} in bare loops")
    for table in tables.values():
        _print_table(*table, limits)
    figures = {"limits": asdict(limits)} | {
        phase: {"seconds": seconds, "kernels": [asdict(kernel) for kernel in kernels]}
        for phase, (_, seconds, _, kernels) in tables.items()
    }
    write_figures(namespace.output_json, {"model": llm.model_config.model} | figures)
    if namespace.plot is not None:
        write_text(namespace.plot, "--plot", _render(llm.model_config.model, tables, limits))


def native_model(llm: "LLM") -> "CompiledModel":
    """The compiled model of an engine in this process; ConfigError where there is none."""
    from quire.executor.inprocess import InProcessExecutor
    from quire.models.compiled import CompiledModel

    executor = llm.llm_engine.executor
    model = executor.worker.runner.model if isinstance(executor, InProcessExecutor) else None
    if not isinstance(model, CompiledModel):
        remedy = "leave out other devices, ranks, float16 and kernels=torch"
        raise ConfigError(f"quire bench step times compiled kernels in this process: {remedy}.")
    return model


def measure_limits(model: "CompiledModel", rounds: int = 15) -> Limits:
    """What bare loops reach just now, with the model's level and threads: some 0.08 s a round."""
    import torch

    from quire.ops.native.library import loaded_library, prefault
    from quire.worker.pages import huge_pages

    target, bare_loop = model.target, loaded_library().quire_bare_loop
    memory = huge_pages((_READ_BYTES,), torch.uint8)  # as weights are
    prefault(memory, target.num_threads)
    calls = [(memory.data_ptr(), _READ_BYTES, 0), *((None, _MULTIPLY_ROUNDS, factors) for factors in range(3))]
    rates = [list[float]() for _ in calls]
    for _ in range(rounds):  # a third of a second: the clock of a first moment does not last
        for call, found in zip(calls, rates, strict=True):
            done, start, spent = 0.0, time.perf_counter(), 0.0
            while spent < 0.02:
                done += bare_loop(target.kernels, target.num_threads, *call)
                spent = time.perf_counter() - start
            found.append(done / spent)
    return Limits(*map(median, rates))


def _steps(llm: "LLM", model: "CompiledModel", prompts: list[Any], most: int) -> _Timed:
    """The prompts' steps (0), or so many that decode: seconds, steps, each instruction's time, tokens made by then."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=None if most else 1, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"step-{number}", prompt, params)
    made: dict[str, int] = {}  # tokens of each sequence

    def step() -> None:
        outputs = engine.step()
        made.update((output.request_id, len(output.outputs[0].token_ids)) for output in outputs)
        if most and any(output.finished for output in outputs):
            remedy = "lower --batch-size or --num-steps, or raise --max-model-len, --max-num-seqs or --num-kv-blocks"
            raise ConfigError(f"a sequence ended before {most} steps of all {len(prompts)} were timed: {remedy}.")

    # One more than prompts take: where prefixes are cached, the first that decodes meets blocks that nothing touched.
    while most and (len(made) < len(prompts) or min(made.values()) < 2):
        step()
    model.spent()  # what was until now
    done, mean, start = 0, sum(made.values()) / len(prompts), time.perf_counter()
    while engine.has_unfinished_requests() and (not most or done < most):
        step()
        done += 1
    seconds = time.perf_counter() - start
    engine.abort_request([*made])
    engine.discard_outputs(made)
    return seconds, done, model.spent(), mean + (done - 1) / 2


def _prompt_keys(size: int, length: int, num_steps: int) -> tuple[Callable[[float], float], Callable[[float], float]]:
    each = size / num_steps
    # Read once, at least.
    return lambda window: each * keys_seen(length, window), lambda window: each * min(window, length)


def keys_seen(length: int, window: float) -> float:
    """Keys that the first `length` tokens of a sequence meet, summed over them, at most `window` each."""
    inside = min(window, length)
    return inside * (inside + 1) / 2 + (length - inside) * inside


def _decoding_keys(size: int, context: float, shared: int) -> tuple[Callable[[float], float], Callable[[float], float]]:
    def read(window: float) -> float:
        return size * min(window, context) - (size - 1) * (shared if window >= context else 0)

    return lambda window: size * min(window, context), read


def kernels_of(llm: "LLM", spent: tuple[_Spents, _Spents], work: Work, level: str) -> list[Kernel]:
    """What a step's kernels did, by kinds; of products by weights."""
    from quire.ops.native.matrix import PackedMatrix, weight_order
    from quire.ops.native.structs import Type

    report = llm.llm_engine.executor.report if llm.llm_engine.executor else None
    is_float = llm.model_config.dtype == "float32"
    key_bytes = 1 if report and report.kv_cache_dtype == "int8" else 4 if is_float else 2
    found: dict[str, Kernel] = {}
    for op, spec, seconds, calls, rows, _ in chain(*spent):
        name, num_bytes, operations, rounds_x, floats = op, 0.0, 0.0, 0, is_float
        calls, rows = calls / work.num_steps, rows / work.num_steps
        if op == "linear":
            weight, kind, size = spec.weight, Type(spec.weight.type), (spec.weight.rows, spec.weight.cols)
            name = f"product {size[0]} x {size[1]} {kind.name.lower().split('_')[0]}"
            num_bytes = calls * math.prod(PackedMatrix.data_shape(*size, kind))
            operations = 2.0 * math.prod(size) * rows
            rounds_x = order[2] if (order := weight_order(level, kind))[:2] == (kind, weight.paired) else 0
        elif op == "attention":
            heads, window = spec.heads, spec.window or math.inf
            seen = work.seen if rows >= work.num_tokens else work.read  # the last layer's: by the newest tokens alone
            num_bytes = work.read(window) * heads.num_kv_heads * heads.head_dim * 2 * key_bytes
            floats = is_float or level == "avx2"
            operations = 4.0 * seen(window) * heads.num_heads * heads.head_dim
        kernel = found.setdefault(name, Kernel(name, rounds_x=rounds_x, floats=floats))
        kernel.calls += calls
        kernel.seconds += seconds / work.num_steps
        kernel.num_bytes += num_bytes
        kernel.operations += operations
    return [*found.values()]


def _print_table(title: str, step: float, tokens: float, kernels: list[Kernel], limits: Limits) -> None:
    print(f"\n{title}: {step * 1e3:.3f} ms, {tokens / step:,.0f} tokens/s")
    print(f"{'kernel':30}{'calls':>6}{'ms':>10}{'of step':>9}{'MB':>9}{'GB/s':>8}{'GFLOP':>9}{'GFLOP/s':>9}  limit")
    for kernel in sorted(kernels, key=lambda kernel: -kernel.seconds):
        seconds = kernel.seconds or math.inf
        row = f"{kernel.name:30}{kernel.calls:6.0f}{kernel.seconds * 1e3:10.3f}{kernel.seconds / step:9.1%}"
        if kernel.num_bytes + kernel.operations:
            row += f"{kernel.num_bytes / 1e6:9.1f}{kernel.num_bytes / seconds / 1e9:8.1f}"
            row += f"{kernel.operations / 1e9:9.2f}{kernel.operations / seconds / 1e9:9.0f}"
            row += f"  {kernel.floor(limits) / seconds:.0%} of {kernel.bound(limits)}"
        print(row)
    rest = step - sum(kernel.seconds for kernel in kernels)
    print(f"{'outside of kernels':30}{'':6}{rest * 1e3:10.3f}{rest / step:9.1%}   scheduling, inputs, sampling, text")
    floors = {what: sum(k.floor(limits) for k in kernels if k.bound(limits) == what) for what in _COLOURS}
    floor, most = sum(floors.values()), max(floors, key=floors.__getitem__)
    share = f"{floors[most] / floor:.0%} of that by {most}"
    print(f"The floor is {floor * 1e3:.3f} ms, {share}: {floor / step:.0%} of the step.")


def _render(model: str, tables: dict[str, _Table], limits: Limits) -> str:
    """Bars of each kernel's time, and in them its floor."""
    parts: list[str] = []
    top = 90.0
    for phase, (_, step, _, kernels) in tables.items():
        rest = Kernel("outside of kernels", seconds=max(0.0, step - sum(kernel.seconds for kernel in kernels)))
        shown = sorted([*kernels, rest], key=lambda kernel: -kernel.seconds)
        box = 220.0, top, 560.0, 24.0 * len(shown)
        most = shown[0].seconds * 1e3
        parts += axis(box, most, f"{phase}: ms of a step of {step * 1e3:.2f}")
        parts += _bars(shown, box, most, limits)
        top += box[3] + 80
    for place, (name, colour) in enumerate(_COLOURS.items()):
        shown_name = f"floor by {name}" if name != "neither" else "no floor"
        style = f'style="fill: {colour}" font-weight="600"'
        parts.append(text(220 + 190 * place, top - 20, shown_name, "start", style))
    title = f"{model}: a step's kernels, and what this machine's limits leave of them"
    return document(840, top + 10, title, "", parts)


def _bars(kernels: list[Kernel], box: tuple[float, float, float, float], most: float, limits: Limits) -> Iterator[str]:
    x, y, width, _ = box
    for row, kernel in enumerate(kernels):
        colour, place = _COLOURS[kernel.bound(limits)], y + 24 * row
        for seconds, opacity in ((kernel.seconds, 0.3), (min(kernel.seconds, kernel.floor(limits)), 1)):
            size = width * seconds * 1e3 / most
            yield f'<rect x="{x}" y="{place + 4}" width="{size:.1f}" height="16" fill="{colour}" opacity="{opacity}"/>'
        yield text(x - 8, place + 16, kernel.name, "end")
