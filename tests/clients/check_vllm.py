"""`vllm bench serve`, by its own code: random prompts by chat and by completions, with the parameters that it sends.

The command `vllm` itself can't start from a wheel for CPUs that goes by another name than vllm; what `bench serve` runs
is called here instead.
"""

import os
from typing import Any

import harness

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

NUM_REQUESTS, NUM_TOKENS = 24, 16
COMMON = {
    "base-url": harness.URL,
    "model": "demo",
    "tokenizer": harness.TOKENIZER,
    "dataset-name": "random",
    "random-input-len": 32,
    "random-output-len": NUM_TOKENS,
    "num-prompts": NUM_REQUESTS,
    "max-concurrency": 8,
    "percentile-metrics": "ttft,tpot,itl,e2el",
}


def benchmark(*flags: str, **options: Any) -> dict[str, Any]:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    given = {**COMMON, **{name.replace("_", "-"): value for name, value in options.items()}}
    arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    result = main(parser.parse_args([*arguments, "--ignore-eos", *flags]))
    assert isinstance(result, dict), "the benchmark tells its figures"
    return result


def check(result: dict[str, Any]) -> None:
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0), result
    assert result["total_output_tokens"] == NUM_REQUESTS * NUM_TOKENS, result
    assert result["median_ttft_ms"] > 0


def chat() -> None:
    check(benchmark(backend="openai-chat", endpoint="/v1/chat/completions", repetition_penalty=1.1, top_k=20))


def completions() -> None:
    check(benchmark(backend="openai", endpoint="/v1/completions", temperature=0.7, top_p=0.9, min_p=0.01))


def logprobs_and_arrivals_at_a_rate() -> None:
    check(benchmark(backend="vllm", endpoint="/v1/completions", logprobs=2, request_rate=100, temperature=0))


if __name__ == "__main__":
    harness.run(chat, completions, logprobs_and_arrivals_at_a_rate)
