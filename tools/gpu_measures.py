"""What the sections of the check on a GPU measure with: engines of random weights, clocks, and traces of kernels."""

import contextlib
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DEVICE = "cuda"
Result = dict[str, Any]

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
SHAPES: dict[str, Result] = {
    "llama-3-8b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "vocab_size": 151936,
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
}  # fmt: skip
# A quarter of the layers, for what is compared with itself: it starts in less time.
SHAPES["llama-3-8b, 8 layers"] = SHAPES["llama-3-8b"] | {"num_hidden_layers": 8}


def model(name: str) -> str:
    """A folder with the configuration of a shape, which `load_format="dummy"` fills."""
    folder = Path(tempfile.gettempdir()) / "quire_gpu_check" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return str(folder)


def engine(name: str, **options: Any) -> Any:
    from quire import LLM

    given = {"load_format": "dummy", "skip_tokenizer_init": True, "device": DEVICE, "max_model_len": 8192, **options}
    return LLM(model=model(name), **given)


def requests(lengths: list[tuple[int, int]], seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Prompts and parameters of greedy requests of so many prompt and output tokens, without text."""
    from quire import SamplingParams

    rng = random.Random(seed)
    prompts = [{"prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(n)]} for n, _ in lengths]
    return prompts, [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True, detokenize=False) for _, m in lengths]


def run(llm: Any, lengths: list[tuple[int, int]], seed: int = 0) -> float:
    """Seconds of requests of so many prompt and output tokens, all at once."""
    prompts, params = requests(lengths, seed)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == [m for _, m in lengths]
    return seconds


def steps(llm: Any, lengths: list[tuple[int, int]]) -> list[float]:
    """When each step ended that was between the first token of the last of these requests and the end of any."""
    from quire.sampling_params import RequestOutputKind

    for i, (prompt, params) in enumerate(zip(*requests(lengths), strict=True)):
        params.output_kind = RequestOutputKind.FINAL_ONLY
        llm.llm_engine.add_request(str(i), prompt, params)
    ended, outputs = list[float](), list[Any]()
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
        ended.append(time.monotonic())
    first = max(output.metrics.first_token_time for output in outputs)
    last = min(output.metrics.finished_time for output in outputs)
    return [end for end in ended if first <= end < last]


def mean(ended: Sequence[float]) -> float:
    """Seconds of a step, of when steps ended."""
    return (ended[-1] - ended[0]) / (len(ended) - 1)


def step_seconds(llm: Any, prompt: int, tokens: int, size: int = 1, rounds: int = 1) -> float:
    """Seconds of a step that decodes `size` sequences: what tokens after the first take. The least of some rounds.

    A round has the prompts of the one before, and of those with more: a prefix cache finds them. While they are
    computed, chunk after chunk, the first ones get tokens already: `tokens` more are for them.
    """
    run(llm, [(prompt, 8)] * size)
    return min(mean(steps(llm, [(prompt, tokens + 2)] * size)) for _ in range(rounds))


def kernels(function: Callable[[], Any], most: int = 12) -> list[Result]:
    """Which kernels the device was busy with while the function ran, and for how long: those that took most."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
    found = sorted(profiled.key_averages(), key=lambda each: -each.self_device_time_total)[:most]
    return [{"kernel": each.key[:60], "calls": each.count, "ms": each.self_device_time_total / 1e3} for each in found]


def trace(function: Callable[[], Any]) -> list[Result]:
    """The kernels that the device ran meanwhile, as Chrome's traces have them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel"]


def own_times(events: list[Result], first: str) -> list[Result]:
    """Of the steps that begin with the kernel `first`: how many microseconds each kernel of some grid adds to one.

    That is from when all before it have ended to its own end, however early it came to its place; the medians of steps
    of as many kernels as most of them have, but for the first few.
    """
    events = sorted(events, key=lambda event: event["ts"])
    begins = [i for i, event in enumerate(events) if event["name"].startswith(first)]
    steps = [events[begin:end] for begin, end in itertools.pairwise(begins)]
    most = statistics.mode(len(step) for step in steps)
    alike = [step for step in steps if len(step) == most]
    alike = alike[min(4, len(alike) - 1) :]
    found: dict[tuple[str, str], Result] = {}
    last = 0.0
    for i, event in enumerate(alike[0]):
        name, grid = event["name"][:60], str(event.get("args", {}).get("grid"))
        end = statistics.median(step[i]["ts"] + step[i]["dur"] - step[0]["ts"] for step in alike)
        row = found.setdefault((name, grid), {"kernel": name, "grid": grid, "calls": 0, "own_us": 0.0})
        row["calls"] += 1
        row["own_us"] += max(0.0, end - last)
        last = max(last, end)
    return list(found.values())


def release() -> None:
    """Give back the memory of engines that nothing refers to any more."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def told_of_failure() -> Iterator[Result]:
    """What goes wrong inside is noted, and no more."""
    failed: Result = {}
    try:
        yield failed
    except Exception as error:
        failed["not_profiled"] = repr(error)


def timed(function: Callable[[], Any], rounds: int = 20) -> float:
    """Seconds of work on the device, by its own clock: the least of some rounds."""
    import torch

    function()
    found: list[float] = []
    flush = torch.zeros(2**25, dtype=torch.int64, device="cuda")
    for _ in range(rounds):
        flush.sum()  # nothing that is read is in a cache, nor anything there that must be written first
        torch.cuda._sleep(1_000_000)  # the host gets ahead, so that the kernels wait for nothing
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return min(found)
