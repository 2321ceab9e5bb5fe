"""Several requests at once from asyncio, each streamed as it comes: python examples/async_llm.py"""

import asyncio

from quire import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

PROMPTS = ["Once upon a time", "The ship had been at sea for", "Nobody in the village knew why"]


async def tell(llm: AsyncLLM, prompt: str) -> str:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    story = prompt
    async for output in llm.generate(prompt, params):
        story += output.outputs[0].text
        print(".", end="", flush=True)  # a sign of each step
    return story


async def main(llm: AsyncLLM) -> None:
    for story in await asyncio.gather(*(tell(llm, prompt) for prompt in PROMPTS)):
        print(f"\n{story}")


if __name__ == "__main__":
    llm = AsyncLLM.from_engine_args(EngineArgs(model="demo"))
    try:
        asyncio.run(main(llm))
    finally:
        llm.shutdown()
