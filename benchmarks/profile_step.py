"""Where a step's time goes: python benchmarks/profile_step.py MODEL [--batch 32] [--context 256] [KEY=VALUE ...]

Decodes a batch and prints, per step: the whole, each kind of kernel, and what is left for Python (scheduling, input
preparation, sampling, output processing). KEY=VALUE are engine arguments in JSON.
"""

import argparse
import json
import random
import time

from quire import LLM, SamplingParams
from quire.executor.inprocess import InProcessExecutor
from quire.models.compiled import CompiledModel


def main() -> None:
    """Print the profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args()
    options = {key: json.loads(value) for key, value in (option.split("=", 1) for option in args.options)}
    llm = LLM(model=args.model, enable_prefix_caching=False, **options)
    executor = llm.llm_engine.core.executor
    assert isinstance(executor, InProcessExecutor)
    model = executor.worker.runner.model
    assert isinstance(model, CompiledModel), "the profile is of the native kernels"
    rng = random.Random(0)
    vocab = min(model.vocab_size, 100_000)
    for i in range(args.batch):
        prompt = [rng.randrange(3, vocab) for _ in range(args.context)]
        params = SamplingParams(temperature=0, max_tokens=args.steps + 8, ignore_eos=True)
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    engine = llm.llm_engine
    while len({output.request_id for output in engine.step()}) < args.batch:
        pass  # prompts are still being computed
    before = model.times()
    start = time.perf_counter()
    for _ in range(args.steps):
        engine.step()
    whole = (time.perf_counter() - start) / args.steps
    kernels = {name: (seconds - before[name]) / args.steps for name, seconds in model.times().items()}
    print(f"{args.batch} sequences, {args.context} tokens of context: {whole * 1e3:.3f} ms a step")
    for name, seconds in kernels.items():
        print(f"  {name:10} {seconds * 1e3:8.3f} ms  {seconds / whole:6.1%}")
    rest = whole - sum(kernels.values())
    print(f"  {'the rest':10} {rest * 1e3:8.3f} ms  {rest / whole:6.1%}   (Python, sampling included)")


if __name__ == "__main__":
    main()
