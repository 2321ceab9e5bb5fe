"""`quire bench latency` and `quire bench throughput`: seconds and tokens per second of the offline engine.

Prompts are random token ids from the seed, or the lines of a file. Output lengths are exact: the end-of-sequence
token is ignored. The figures' names, on screen and in the JSON file, are those that vLLM's users know.
"""

import json
import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.entrypoints.cli.flags import add_engine_flags, positive_int
from quire.entrypoints.cli.session import load
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.entrypoints.llm import LLM

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_latency_flags(parser: ArgumentParser) -> None:
    """The flags of `quire bench latency`."""
    _add_shape_flags(parser, input_len=32, output_len=128)
    parser.add_argument("--batch-size", type=positive_int, default=8, metavar="N", help="prompts (default: 8)")
    parser.add_argument("--num-iters-warmup", type=int, default=10, metavar="N", help="untimed runs (default: 10)")
    parser.add_argument("--num-iters", type=positive_int, default=30, metavar="N", help="timed runs (default: 30)")
    # Every run asks the same prompts: a cached prefix would hide the cost of reading them.
    add_engine_flags(parser, {"enable_prefix_caching": False})


def add_throughput_flags(parser: ArgumentParser) -> None:
    """The flags of `quire bench throughput`."""
    parser.add_argument(
        "--dataset",
        metavar="FILE",
        help='prompts instead of random ones: text, one a line, or .jsonl of {"prompt": ..., "max_tokens": ...}',
    )
    parser.add_argument(
        "--num-prompts", type=positive_int, metavar="N", help="requests (default: 100, or all of the dataset)"
    )
    _add_shape_flags(parser, input_len=64, output_len=64)
    add_engine_flags(parser)


def _add_shape_flags(parser: ArgumentParser, *, input_len: int, output_len: int) -> None:
    for name, default, what in (("--input-len", input_len, "prompt"), ("--output-len", output_len, "output")):
        parser.add_argument(
            name, type=positive_int, default=default, metavar="N", help=f"tokens of each {what} (default: {default})"
        )
    parser.add_argument("--output-json", metavar="FILE", help="write the figures to this file, too")


def run_latency(namespace: Namespace) -> None:
    """Time `--num-iters` runs of one batch, each from the prompts to the last token."""
    from tqdm import tqdm  # not needed for --help, and slow to import

    llm, _ = load(namespace)
    prompts = _random_prompts(llm, namespace.batch_size, namespace.input_len)
    params = _fixed_length(namespace.output_len)
    for _ in range(namespace.num_iters_warmup):
        llm.generate(prompts, params, use_tqdm=False)
    latencies: list[float] = []
    for _ in tqdm(range(namespace.num_iters), desc="Timing", disable=None):
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        latencies.append(time.perf_counter() - start)
    average = sum(latencies) / len(latencies)
    percentiles = {str(p): percentile(latencies, p) for p in _PERCENTILES}
    print(f"Avg latency: {average:.4f} seconds")
    for p, seconds in percentiles.items():
        print(f"{p}% percentile latency: {seconds:.4f} seconds")
    _write_json(namespace, {"avg_latency": average, "latencies": latencies, "percentiles": percentiles})


def run_throughput(namespace: Namespace) -> None:
    """Give the engine all requests at once and time it until the last is done."""
    requests = _read_dataset(namespace) if namespace.dataset else None
    llm, _ = load(namespace)
    if requests is None:
        count = namespace.num_prompts or 100
        requests = [(prompt, namespace.output_len) for prompt in _random_prompts(llm, count, namespace.input_len)]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], [_fixed_length(n) for _, n in requests])
    elapsed = time.perf_counter() - start
    num_input = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    rates = [count / elapsed for count in (len(requests), num_input + num_output, num_output)]
    print("Throughput: {:.2f} requests/s, {:.2f} total tokens/s, {:.2f} output tokens/s".format(*rates))
    print(f"Total num prompt tokens:  {num_input}\nTotal num output tokens:  {num_output}")
    figures = {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "num_prompt_tokens": num_input,
        "num_output_tokens": num_output,
        "total_num_tokens": num_input + num_output,
        "requests_per_second": rates[0],
        "tokens_per_second": rates[1],
        "output_tokens_per_second": rates[2],
    }
    _write_json(namespace, figures)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated linearly between neighbours."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _random_prompts(llm: "LLM", count: int, length: int) -> list[Any]:
    """`count` prompts of `length` random token ids, the same for the same engine seed."""
    draw = random.Random(llm.model_config.seed)
    return [{"prompt_token_ids": draw.choices(range(llm.model_config.vocab_size), k=length)} for _ in range(count)]


def _fixed_length(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=num_tokens)


class _Record(msgspec.Struct):
    """A line of a .jsonl dataset."""

    prompt: str | list[int]
    max_tokens: int | None = None


def _read_dataset(namespace: Namespace) -> list[tuple[Any, int]]:
    """Prompts of `--dataset` with the number of tokens to generate for each.

    Raises:
        ConfigError: the file can't be read, or a line of it is not understood.
    """
    path = Path(namespace.dataset)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}.") from None
    requests: list[tuple[Any, int]] = []
    for number, line in enumerate(lines[: namespace.num_prompts], start=1):
        if path.suffix != ".jsonl":
            requests.append((line, namespace.output_len))
            continue
        try:
            record = msgspec.json.decode(line, type=_Record)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--dataset {path}, record {number}: {error}.") from None
        prompt = record.prompt if isinstance(record.prompt, str) else {"prompt_token_ids": record.prompt}
        requests.append((prompt, record.max_tokens or namespace.output_len))
    if not requests:
        raise ConfigError(f"--dataset {path} holds no prompt.")
    return requests


def _write_json(namespace: Namespace, figures: dict[str, Any]) -> None:
    if namespace.output_json is None:
        return
    try:
        Path(namespace.output_json).write_text(json.dumps(figures, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json {namespace.output_json}: {error.strerror}.") from None
