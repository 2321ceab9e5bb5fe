"""Continue a few prompts with one set of sampling parameters. Run: python examples/offline_basic.py [MODEL]"""

import sys

from quire import LLM, SamplingParams

prompts = [
    "The old house stood at the edge of the wood, and",
    "It was a bright morning in spring when",
    "Nobody in the village knew why",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48)

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "demo")
for output in llm.generate(prompts, sampling_params):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
