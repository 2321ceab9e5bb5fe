"""One prompt in three voices, in one batch: the bundled model, and two adapters (LoRA) that were trained for it.

Run: python examples/adapters.py
"""

from pathlib import Path

import quire
from quire import LLM, SamplingParams
from quire.lora.request import LoRARequest

folder = Path(quire.__file__).parent / "demo" / "adapters"
adapters = sorted(path for path in folder.iterdir() if path.is_dir())
voices = [None, *(LoRARequest(path.name, number, str(path)) for number, path in enumerate(adapters, 1))]

llm = LLM("demo", enable_lora=True)
sampling_params = SamplingParams(temperature=0.7, top_p=0.95, seed=3, max_tokens=40)
for output in llm.generate(["The king"] * len(voices), sampling_params, use_tqdm=False, lora_request=voices):
    name = output.lora_request.lora_name if output.lora_request else "demo"
    print(f"{name}: {output.prompt}{output.outputs[0].text}\n")
