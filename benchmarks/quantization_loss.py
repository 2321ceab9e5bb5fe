"""What weight-only quantization costs: python benchmarks/quantization_loss.py MODEL [TEXT] [--others CHECKPOINT ...]

Perplexity of the model on the text (windows of tokens, each predicted from its own beginning) with the weights as they
are, in int8, int4, w8a8 and w4a8, and of quantized checkpoints of the same model; and the error of the
log-probabilities from the unquantized ones. Without TEXT random tokens are used, which say nothing about perplexity,
but do about the error.
"""

import argparse
import math
import random
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

FORMATS: tuple[dict[str, str], ...] = (
    {},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"quantization": "w8a8"},
    {"quantization": "w4a8"},
    {"kv_cache_dtype": "int8"},
)


def logprobs_of(llm: LLM, windows: list[list[int]]) -> list[float]:
    """The log-probability of every token but each window's first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found: list[float] = []
    for output in llm.generate([{"prompt_token_ids": window} for window in windows], params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        assert output.prompt_token_ids is not None
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            found.append(entry[token].logprob)
    return found


def main() -> None:
    """Print a line per format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--others", nargs="*", default=[], help="quantized checkpoints of the model")
    args = parser.parse_args()
    baseline: list[float] = []
    ids: list[int] = []
    for options in (*FORMATS, *({"model": path} for path in args.others)):
        given: dict[str, Any] = {"model": args.model, "dtype": args.dtype} | options
        llm = LLM(**given, enable_prefix_caching=False, max_num_seqs=64)
        if not ids and args.text:
            ids = llm.get_tokenizer().encode(args.text.read_text())[: args.tokens]
        elif not ids:
            rng = random.Random(0)
            vocab = llm.llm_engine.config.model.vocab_size
            ids = [rng.randrange(3, vocab) for _ in range(args.tokens)]
        windows = [ids[i : i + args.window] for i in range(0, len(ids) - args.window + 1, args.window)]
        found = logprobs_of(llm, windows)
        baseline = baseline or found
        error = math.sqrt(sum((a - b) ** 2 for a, b in zip(found, baseline, strict=True)) / len(found))
        name = ", ".join(f"{key}={value}" for key, value in options.items()) or "as it is"
        mean = -sum(found) / len(found)
        print(
            f"{name:24} {mean:.4f} nats/token, perplexity {math.exp(mean):9.3f}, logprob error {error:.4f} (rms)",
            flush=True,
        )
        llm.llm_engine.shutdown()


if __name__ == "__main__":
    main()
