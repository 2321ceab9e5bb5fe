"""What a load test asks for, and when: random prompts, a recorded trace, or prompts of the user's own.

Random prompts are token ids where the server says how many there are, else common words, of which each stands for a
token. The same seed gives the same requests and arrivals. Must not know how requests are sent.
"""

import csv
import io
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
_WORDS_SHARE = 0.75  # of a context that is filled with words
_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour"
)
_WORDS = _TEXT.split()


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
    """All requests of a run, of token ids below `vocab_size` or, where that is None, of words."""
    path, output_len = args.dataset_path or "", args.random_output_len or _OUTPUT_LEN
    if args.dataset_name in ("custom", "sharegpt"):
        requests = [Request(*each) for each in read_prompts(path, "--dataset-path", args.num_prompts, output_len)]
    elif args.dataset_name == "trace":
        requests = fill(read_trace(path, args.num_prompts, args.trace_scale or 1.0), vocab_size, args)
    else:
        shapes = random_shapes(args, output_len)
        longest = max(shape.input_len + shape.output_len for shape in shapes) + (args.random_prefix_len or 0)
        if max_model_len is not None and longest > max_model_len:
            raise ConfigError(
                f"a prompt and its output of {longest} tokens do not fit in the server's max_model_len of "
                f"{max_model_len}: lower --random-input-len or --random-output-len."
            )
        requests = fill(shapes, vocab_size, args)
    if args.keeps_trace_times:
        return requests
    times = arrival_times(len(requests), args.request_rate or math.inf, args.burstiness or 1.0, args.seed)
    return [replace(request, arrival=time) for request, time in zip(requests, times, strict=True)]


def fit_lengths(args: LoadArgs, vocab_size: int | None, max_model_len: int | None) -> LoadArgs:
    """Where the user named no lengths: the default ones, or shorter ones of their proportion that the server takes."""
    named = args.random_input_len is not None or args.random_output_len is not None
    if args.dataset_name != "random" or named or max_model_len is None:
        return args
    ratio, prefix = args.random_range_ratio or 0.0, args.random_prefix_len or 0
    # A word is a token or a few more.
    room = (max_model_len - prefix) * (1.0 if vocab_size is not None else _WORDS_SHARE) / (1 + ratio)
    if room >= _INPUT_LEN + _OUTPUT_LEN:
        return args
    # Drawn lengths are rounded up, each by less than one.
    output_len = max(1, int(room * _OUTPUT_LEN / (_INPUT_LEN + _OUTPUT_LEN)))
    input_len = max(1, int(room - output_len - 2 * (ratio > 0)))
    return replace(args, random_input_len=input_len, random_output_len=output_len)


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` a second: all at once where it is infinite.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    steadier. They are scaled so that the last request arrives at `count / rate`: the rate is kept in every draw.
    """
    if math.isinf(rate):
        return [0.0] * count
    times = np.cumsum(np.random.default_rng([seed, 1]).gamma(burstiness, size=count))
    return (times / max(times[-1], 1e-300) * (count / rate)).tolist()


def random_shapes(args: LoadArgs, output_len: int) -> list[Shape]:
    """Shapes with lengths drawn evenly from their share below to their share above those that the options name."""
    count, ratio = args.num_prompts or _NUM_PROMPTS, args.random_range_ratio or 0.0
    rng = np.random.default_rng(args.seed)

    def draw(length: int) -> list[int]:
        lowest, highest = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
        return rng.integers(lowest, highest, count, endpoint=True).tolist()

    input_lens, output_lens = draw(args.random_input_len or _INPUT_LEN), draw(output_len)
    return [Shape(0.0, *lengths) for lengths in zip(input_lens, output_lens, strict=True)]


def fill(shapes: Sequence[Shape], vocab_size: int | None, args: LoadArgs) -> list[Request]:
    """Requests of random content; where shapes have first blocks in common, so have the prompts."""
    rng, size = np.random.default_rng(args.seed), vocab_size or len(_WORDS)
    prefix = rng.integers(size, size=args.random_prefix_len or 0).tolist()
    block_len = math.ceil(_BLOCK * (args.trace_scale or 1.0))
    requests: list[Request] = []
    for shape in shapes:
        if shape.blocks:
            own = (np.random.default_rng([args.seed, block]) for block in shape.blocks)
            numbers = np.concatenate([each.integers(size, size=block_len) for each in own])[: shape.input_len].tolist()
        else:
            numbers = prefix + rng.integers(size, size=shape.input_len).tolist()
        prompt = numbers if vocab_size is not None else " ".join(_WORDS[number] for number in numbers)
        requests.append(Request(prompt, shape.output_len, shape.arrival))
    return requests


def read_trace(path: str, count: int | None, scale: float) -> list[Shape]:
    """The first `count` requests of a trace: Azure's CSV or Mooncake's JSON lines, told apart by their first byte.

    All lengths are multiplied by `scale`.

    Raises:
        ConfigError: the file can't be read, or holds no trace.
    """
    text = read_text(path, "--dataset-path")
    rows = sorted(_mooncake(text, path) if text.startswith("{") else _azure(text, path), key=lambda row: row.arrival)
    if not rows:
        raise ConfigError(f"--dataset-path {path} holds no request.")
    shapes: list[Shape] = []
    for row in rows[:count]:
        input_len, output_len = (max(1, round(length * scale)) for length in (row.input_len, row.output_len))
        shapes.append(Shape(row.arrival - rows[0].arrival, input_len, output_len, row.blocks))
    return shapes


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
