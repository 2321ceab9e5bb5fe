"""`quire bench latency`, `quire bench throughput` and `quire bench serve`: how fast an engine or a server is.

The figures' names, on screen and in the JSON file, are those that vLLM's users know. The load on a server is made by
`quire.entrypoints.cli.load`; the other two run an engine in this process. Output lengths are exact there: the
end-of-sequence token is ignored.
"""

import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from quire.entrypoints.cli.files import OutputFile, read_prompts, write_figures
from quire.entrypoints.cli.flags import add_counts, add_engine_flags, add_option_flags, options_given, positive_int
from quire.entrypoints.cli.load.options import LoadArgs
from quire.entrypoints.cli.session import load, random_prompts
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.entrypoints.llm import LLM


def add_latency_flags(parser: ArgumentParser) -> None:
    """The flags of `quire bench latency`."""
    _add_shape_flags(parser, input_len=32, output_len=128)
    add_counts(parser, ("--batch-size", 8, "prompts"))
    parser.add_argument("--num-iters-warmup", type=int, default=10, metavar="N", help="untimed runs (default: 10)")
    add_counts(parser, ("--num-iters", 30, "timed runs"))
    # Every run asks the same prompts: a cached prefix would hide the cost of reading them.
    add_engine_flags(parser, {"enable_prefix_caching": False})


def add_throughput_flags(parser: ArgumentParser) -> None:
    """The flags of `quire bench throughput`."""
    help_text = 'prompts instead of random ones: text, one a line, .jsonl of {"prompt": ..., "max_tokens": ...}, or '
    help_text += "ShareGPT's .json of conversations"
    parser.add_argument("--dataset-path", "--dataset", dest="dataset", metavar="FILE", help=help_text)
    parser.add_argument("--dataset-name", choices=["random", "custom", "sharegpt"], help="what --dataset-path holds")
    parser.add_argument("--num-prompts", type=positive_int, metavar="N", help="requests (default: 100, or all given)")
    _add_shape_flags(parser, input_len=64, output_len=64)
    add_engine_flags(parser)


def add_serve_flags(parser: ArgumentParser) -> None:
    """The flags of `quire bench serve`."""
    add_option_flags(parser, LoadArgs)


def _add_shape_flags(parser: ArgumentParser, *, input_len: int, output_len: int) -> None:
    add_counts(parser, ("--input-len --random-input-len", input_len, "tokens of each prompt"))
    add_counts(parser, ("--output-len --random-output-len", output_len, "tokens of each output"))
    add_counts(parser, ("--n", 1, "outputs of each prompt"))
    parser.add_argument("--output-json", type=OutputFile, metavar="FILE", help="write the figures to this file, too")


def run_latency(namespace: Namespace) -> None:
    """Time `--num-iters` runs of one batch, each from the prompts to the last token."""
    import numpy as np  # not needed for --help, and slow to import, as is tqdm
    from tqdm import tqdm

    llm, _ = load(namespace)
    engine = _tell_engine(llm)
    prompts = random_prompts(llm, namespace.batch_size, namespace.input_len)
    params = _fixed_length(namespace.output_len, namespace.n)
    for _ in range(namespace.num_iters_warmup):
        llm.generate(prompts, params, use_tqdm=False)
    latencies: list[float] = []
    for _ in tqdm(range(namespace.num_iters), desc="Timing", disable=None):
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        latencies.append(time.perf_counter() - start)
    average = sum(latencies) / len(latencies)
    percentiles = {str(p): float(np.percentile(latencies, p)) for p in (10, 25, 50, 75, 90, 99)}
    print(f"Avg latency: {average:.4f} seconds")
    for p, seconds in percentiles.items():
        print(f"{p}% percentile latency: {seconds:.4f} seconds")
    figures = {"avg_latency": average, "latencies": latencies, "percentiles": percentiles} | engine
    write_figures(namespace.output_json, figures)


def run_throughput(namespace: Namespace) -> None:
    """Give the engine all requests at once and time it until the last is done."""
    requests: list[tuple[Any, int]] = []
    if (name := namespace.dataset_name) and (name == "random") is bool(namespace.dataset):
        raise ConfigError(f"--dataset-name {name} {'takes no' if namespace.dataset else 'needs a'} --dataset-path.")
    if namespace.dataset:
        requests = read_prompts(namespace.dataset, "--dataset-path", namespace.num_prompts, namespace.output_len)
    llm, _ = load(namespace)
    engine = _tell_engine(llm)
    if not requests:
        prompts = random_prompts(llm, namespace.num_prompts or 100, namespace.input_len)
        requests = [(prompt, namespace.output_len) for prompt in prompts]
    params = [_fixed_length(length, namespace.n) for _, length in requests]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    elapsed = time.perf_counter() - start
    num_input = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    figures = engine | {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "num_prompt_tokens": num_input,
        "num_output_tokens": num_output,
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
    }
    told = "Throughput: {requests_per_second:.2f} requests/s, {tokens_per_second:.2f} total tokens/s, "
    print((told + "{output_tokens_per_second:.2f} output tokens/s").format_map(figures))
    print(f"Total num prompt tokens:  {num_input}\nTotal num output tokens:  {num_output}")
    write_figures(namespace.output_json, figures)


def run_serve(namespace: Namespace) -> None:
    """Put load on a server, then print and write the figures."""
    args = LoadArgs(**options_given(namespace, LoadArgs))
    from quire.entrypoints.cli.load.bench_serve import run  # asyncio and numpy are slow to import

    run(args)


def _tell_engine(llm: "LLM") -> dict[str, Any]:
    """What the figures depend on besides the model, printed, and for the JSON file."""
    if (executor := llm.llm_engine.executor) is None:
        return {}  # several engines, each in a process of its own
    report = executor.report
    assert report is not None, "a loaded LLM's executor has started"
    print(f"Kernels: {report.kernels}; threads: {report.num_threads}")
    return {"kernels": report.kernels, "num_threads": report.num_threads}


def _fixed_length(num_tokens: int, num_outputs: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=num_tokens, n=num_outputs)
