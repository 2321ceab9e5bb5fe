"""`quire bench serve`: sends load to any OpenAI-compatible server, and tells how long its tokens took.

The flags and the figures' names are those of `vllm bench serve`. Requests and arrivals are made ready before the
clock starts; while it runs, this process does as little as it can.
"""

import asyncio
import contextlib
import json
import math
import random
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.entrypoints.cli.flags import add_option_flags, options_given
from quire.entrypoints.cli.load import plot, report, workload
from quire.entrypoints.cli.load.options import LoadArgs
from quire.entrypoints.cli.load.outcome import Outcome
from quire.entrypoints.cli.load.target import Target, drive
from quire.entrypoints.cli.load.workload import Request, Vocabulary
from quire.entrypoints.cli.remote import RemoteError
from quire.errors import ConfigError

_NUM_PROMPTS, _INPUT_LEN, _OUTPUT_LEN = 1000, 1024, 128


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire bench serve`."""
    add_option_flags(parser, LoadArgs)


def run(namespace: Namespace) -> None:
    """Send the load, then print and write the figures.

    Raises:
        ConfigError: flags contradict each other, or a file can't be read or written.
        RemoteError: the server can't be reached, or no request succeeded.
    """
    args = LoadArgs(**options_given(namespace, LoadArgs))
    _allow_many_connections()
    done = asyncio.run(_bench(args))
    figures = report.figures(done.outcomes, done.duration, args.metrics, args.percentiles, args.bounds)
    print(report.table(figures, args.metrics, args.percentiles))
    print(f"\nThis client used {done.cpu_seconds / done.duration:.0%} of a processor core.")
    facts = _facts(args, done)
    details = report.details(done.outcomes) if args.save_detailed else {}
    named = f"{args.backend}-{facts['request_rate']}qps-{done.model.rpartition('/')[2]}-{facts['date']}.json"
    for path in (args.output_json, named if args.save_result else None):
        if path is not None:
            _write(path, json.dumps(facts | figures | details, indent=4) + "\n")
    if args.plot is not None:
        _write(args.plot, plot.render(done.outcomes, figures, facts))
    if done.interrupted:
        raise KeyboardInterrupt
    if not figures["completed"]:
        raise RemoteError(f"none of the {len(done.outcomes)} requests succeeded.")


def _allow_many_connections() -> None:
    """A request under way takes a file descriptor, of which a process has 1,024 as a rule."""
    import resource  # absent on Windows

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True)
class _Run:
    """What a run brought; times in seconds."""

    outcomes: list[Outcome]
    duration: float
    cpu_seconds: float  # that this process used meanwhile
    model: str
    interrupted: bool


async def _bench(args: LoadArgs) -> _Run:
    from tqdm import tqdm  # not needed for --help, and slow to import

    target = Target(args)
    with contextlib.closing(target.client):
        await target.find_model()
        vocabulary = Vocabulary() if args.dataset_name == "custom" else await target.find_vocabulary()
        requests = _requests(args, vocabulary, target.max_model_len)
        bodies = [target.body(request.prompt, request.max_tokens) for request in requests]
        warmups = bodies[:1] * args.num_warmups
        await drive(target, warmups, [0.0] * len(warmups), args.max_concurrency, tqdm(disable=True))
        arrivals = [request.arrival for request in requests]
        bar = tqdm(total=len(bodies), desc="Requests", unit="req", disable=args.disable_tqdm or None)
        start, cpu_start = time.perf_counter(), time.process_time()
        with contextlib.closing(bar):
            outcomes, interrupted = await drive(target, bodies, arrivals, args.max_concurrency, bar)
        cpu_seconds = time.process_time() - cpu_start
    duration = max((outcome.end for outcome in outcomes), default=time.perf_counter()) - start
    return _Run(outcomes, duration, cpu_seconds, target.model, interrupted)


def _requests(args: LoadArgs, vocabulary: Vocabulary, max_model_len: int | None) -> list[Request]:
    """All requests of the run.

    Raises:
        ConfigError: the dataset is not understood, or random lengths are more than the model takes.
    """

    def arrivals(count: int) -> list[float]:
        rng = random.Random(f"{args.seed} arrivals")
        return workload.arrival_times(count, args.rate, args.burstiness or 1.0, rng)

    path, output_len = Path(args.dataset_path or ""), args.random_output_len or _OUTPUT_LEN
    if args.dataset_name == "custom":
        return workload.custom_requests(path, arrivals, args.num_prompts, output_len)
    if args.dataset_name == "trace":
        scale = args.trace_scale or 1.0
        shapes = workload.read_trace(path, args.num_prompts, args.trace_speedup or 1.0, scale)
        if args.request_rate is not None:
            times = arrivals(len(shapes))
            shapes = [replace(shape, arrival=when) for shape, when in zip(shapes, times, strict=True)]
        return list(workload.trace_requests(vocabulary, shapes, scale, args.seed))
    times, rng = arrivals(args.num_prompts or _NUM_PROMPTS), random.Random(f"{args.seed} lengths")
    input_len, ratio = args.random_input_len or _INPUT_LEN, args.random_range_ratio or 0.0
    shapes = workload.random_shapes(times, input_len, output_len, ratio, rng)
    prefix_len = args.random_prefix_len or 0
    longest = prefix_len + max(shape.input_len + shape.output_len for shape in shapes)
    if max_model_len is not None and longest > max_model_len:
        raise ConfigError(
            f"a prompt and its output of {longest} tokens do not fit in the server's max_model_len of {max_model_len}: "
            "lower --random-input-len or --random-output-len."
        )
    return list(workload.random_requests(vocabulary, shapes, prefix_len, args.seed))


def _facts(args: LoadArgs, done: _Run) -> dict[str, Any]:
    """What was measured, for the file of figures."""
    own_times = args.dataset_name == "trace" and args.request_rate is None
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": done.model,
        "dataset_name": args.dataset_name,
        "num_prompts": len(done.outcomes),
        "request_rate": "trace" if own_times else "inf" if math.isinf(args.rate) else args.rate,
        "burstiness": args.burstiness or 1.0,
        "max_concurrency": args.max_concurrency,
        "client_cpu_seconds": done.cpu_seconds,
    }


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.") from None
