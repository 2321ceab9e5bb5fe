"""What a load test asks for, and when: random prompts, a recorded trace, or prompts of the user's own.

Random prompts are token ids where the server says how many there are, else common words, of which each stands for a
token. The same seed gives the same requests and arrivals. Must not know how requests are sent.
"""

import csv
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec
import numpy as np

from quire.entrypoints.cli.files import decode_record, read_prompts, read_text
from quire.entrypoints.cli.load.options import LoadArgs
from quire.errors import ConfigError

_NUM_PROMPTS, _INPUT_LEN, _OUTPUT_LEN = 1000, 1024, 128
_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour"
).split()


@dataclass(frozen=True)
class Request:
    """One request: what to send, how much to generate, and when, in seconds from the start."""

    prompt: str | list[int]
    max_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Shape:
    """A request before its content: seconds from the start, lengths in tokens, and what its blocks of tokens hold."""

    arrival: float
    input_len: int
    output_len: int
    blocks: Sequence[int] = ()


def make_requests(args: LoadArgs, vocab_size: int | None, max_model_len: int | None) -> list[Request]:
    """All requests of a run.

    Args:
        vocab_size: token ids there are; None asks for words.
        max_model_len: the longest context, where the server tells it.

    Raises:
        ConfigError: the dataset is not understood, or random lengths are more than the model takes.
    """
    rng, output_len = np.random.default_rng(args.seed), args.random_output_len or _OUTPUT_LEN
    if args.dataset_name == "custom":
        prompts = read_prompts(args.dataset_path or "", "--dataset-path", args.num_prompts, output_len)
        times = arrival_times(len(prompts), args.rate, args.burstiness or 1.0, rng)
        return [Request(prompt, n, time) for (prompt, n), time in zip(prompts, times, strict=True)]
    if args.dataset_name == "trace":
        shapes = read_trace(args.dataset_path or "", args.num_prompts, args.trace_speedup or 1.0, args.trace_scale or 1)
        if args.request_rate is not None:
            times = arrival_times(len(shapes), args.rate, args.burstiness or 1.0, rng)
            shapes = [replace(shape, arrival=time) for shape, time in zip(shapes, times, strict=True)]
        return fill(shapes, vocab_size, args)
    times = arrival_times(args.num_prompts or _NUM_PROMPTS, args.rate, args.burstiness or 1.0, rng)
    shapes = random_shapes(times, args.random_input_len or _INPUT_LEN, output_len, args.random_range_ratio or 0.0, rng)
    longest = max(shape.input_len + shape.output_len for shape in shapes) + (args.random_prefix_len or 0)
    if max_model_len is not None and longest > max_model_len:
        raise ConfigError(
            f"a prompt and its output of {longest} tokens do not fit in the server's max_model_len of {max_model_len}: "
            "lower --random-input-len or --random-output-len."
        )
    return fill(shapes, vocab_size, args)


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` a second: all at once where it is infinite.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    steadier. They are scaled so that the last request arrives at `count / rate`: the rate is kept in every draw.
    """
    if math.isinf(rate):
        return [0.0] * count
    times = np.cumsum(rng.gamma(burstiness, size=count))
    return (times / max(times[-1], 1e-300) * (count / rate)).tolist()


def random_shapes(
    arrivals: Sequence[float], input_len: int, output_len: int, range_ratio: float, rng: np.random.Generator
) -> list[Shape]:
    """Shapes with lengths drawn evenly from `range_ratio` below to `range_ratio` above those given."""

    def draw(length: int) -> list[int]:
        lowest, highest = max(1, math.floor(length * (1 - range_ratio))), math.ceil(length * (1 + range_ratio))
        return rng.integers(lowest, highest, len(arrivals), endpoint=True).tolist()

    return [Shape(*shape) for shape in zip(arrivals, draw(input_len), draw(output_len), strict=True)]


def fill(shapes: Sequence[Shape], vocab_size: int | None, args: LoadArgs) -> list[Request]:
    """Requests of random content; where shapes have first blocks in common, so have the prompts."""
    rng, size = np.random.default_rng(args.seed), vocab_size or len(_WORDS)
    prefix = rng.integers(size, size=args.random_prefix_len or 0).tolist()
    block_len = math.ceil(_BLOCK * (args.trace_scale or 1.0))
    requests: list[Request] = []
    for shape in shapes:
        if shape.blocks:
            blocks = (np.random.default_rng([args.seed, block]).integers(size, size=block_len) for block in shape.blocks)
            numbers = np.concatenate(list(blocks))[: shape.input_len].tolist()
        else:
            numbers = prefix + rng.integers(size, size=shape.input_len).tolist()
        prompt = numbers if vocab_size is not None else " ".join(_WORDS[number] for number in numbers)
        requests.append(Request(prompt, shape.output_len, shape.arrival))
    return requests


def read_trace(path: str, count: int | None, speedup: float, scale: float) -> list[Shape]:
    """The first `count` requests of a trace: Azure's CSV or Mooncake's JSON lines, told apart by their first byte.

    Args:
        speedup: the requests come this many times as fast.
        scale: all lengths are multiplied by it.

    Raises:
        ConfigError: the file can't be read, or holds no trace.
    """
    text = read_text(path, "--dataset-path")
    rows = sorted(_mooncake(text, path) if text.startswith("{") else _azure(text, path), key=lambda row: row.arrival)
    if not rows:
        raise ConfigError(f"--dataset-path {path} holds no request.")
    return [
        Shape(
            (row.arrival - rows[0].arrival) / speedup,
            max(1, round(row.input_len * scale)),
            max(1, round(row.output_len * scale)),
            row.blocks,
        )
        for row in itertools.islice(rows, count)
    ]


def _azure(text: str, path: str) -> Iterator[Shape]:
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), start=2):
        try:
            arrival = datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=UTC).timestamp()
            yield Shape(arrival, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (KeyError, ValueError, TypeError):
            columns = "TIMESTAMP, ContextTokens and GeneratedTokens"
            raise ConfigError(f"--dataset-path {path}, line {number}: a trace has the columns {columns}.") from None


class _MooncakeRow(msgspec.Struct):
    """A line of a Mooncake trace; `timestamp` is in milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def _mooncake(text: str, path: str) -> Iterator[Shape]:
    for number, line in enumerate(text.splitlines(), start=1):
        row = decode_record(line, _MooncakeRow, f"--dataset-path {path}, record {number}")
        yield Shape(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)
