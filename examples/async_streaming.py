"""Tokens as they come, from an engine of its own thread. Run: python examples/async_streaming.py"""

import asyncio

from quire import SamplingParams
from quire.engine.arg_utils import AsyncEngineArgs
from quire.sampling_params import RequestOutputKind
from quire.v1.engine.async_llm import AsyncLLM

PROMPTS = ["Far away in a small town", "The key to the old house", "It began to rain, and"]


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)
    num_pieces, text = 0, ""
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for part in output.outputs:
            text += part.text  # what is new
            num_pieces += 1
        if output.finished:
            print(f"{request_id}: {prompt!r} + {text!r} in {num_pieces} pieces")


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="demo", enforce_eager=True))
    try:
        await asyncio.gather(*(stream(engine, prompt, f"stream-{n}") for n, prompt in enumerate(PROMPTS)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
