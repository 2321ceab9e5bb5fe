"""One prompt in several voices, in one batch: the bundled model, two LoRAs and a soft prompt that were trained for it.

Run: python examples/adapters.py
"""

from pathlib import Path

import quire
from quire import LLM, LoRARequest, PromptAdapterRequest, SamplingParams

folder = Path(quire.__file__).parent / "demo" / "adapters"
play, talk = (LoRARequest(name, number, str(folder / name)) for number, name in enumerate(["play", "talk"], 1))
sea = PromptAdapterRequest("sea", 3, str(folder / "sea"), 20)

llm = LLM("demo", enable_lora=True, enable_prompt_adapter=True)
sampling_params = SamplingParams(temperature=0.7, top_p=0.95, seed=3, max_tokens=40)
outputs = llm.generate(
    ["The king"] * 4,
    sampling_params,
    use_tqdm=False,
    lora_request=[None, play, talk, None],
    prompt_adapter_request=[None, None, None, sea],
)
for name, output in zip(("demo", "play", "talk", "sea"), outputs, strict=True):
    print(f"{name}: {output.prompt}{output.outputs[0].text}\n")
