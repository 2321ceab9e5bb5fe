"""Throughput of one engine and of several behind one client, in turn, on the bundled model or another.

    python benchmarks/data_parallel.py [--model demo] [--sizes 1 2] [--requests 400] [--tokens 128] [--rounds 3]

Requests come all at once, with prompts of as many tokens as they generate; outputs are asked for whole, so the front
end has little to do. The first round of each size warms up and is not shown.
"""

import argparse
import asyncio
import time

from quire import AsyncLLM, AsyncOptions, EngineArgs, RequestOutputKind, SamplingParams
from quire.entrypoints.server.replicas import ReplicasClient


async def measure(model: str, size: int, num_requests: int, num_tokens: int, rounds: int) -> list[float]:
    """Output tokens a second of each round."""
    start = ReplicasClient if size > 1 else None
    args, options = EngineArgs(model=model, data_parallel_size=size), AsyncOptions(log_level="warning")
    llm = AsyncLLM.from_engine_args(args, options=options, start=start)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)

    async def one(number: int) -> None:
        prompt = [(number * 31 + place * 7) % 1000 + 100 for place in range(num_tokens)]
        async for _ in llm.generate({"prompt_token_ids": prompt}, params):
            pass

    rates = []
    for turn in range(rounds + 1):
        begin = time.perf_counter()
        await asyncio.gather(*[one(turn * num_requests + number) for number in range(num_requests)])
        rates.append(num_requests * num_tokens / (time.perf_counter() - begin))
    llm.shutdown()
    return rates[1:]


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 1, 2])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for size in args.sizes:
        rates = asyncio.run(measure(args.model, size, args.requests, args.tokens, args.rounds))
        print(f"{size} engines: {', '.join(f'{rate:,.0f}' for rate in rates)} output tokens/s", flush=True)


if __name__ == "__main__":
    main()
