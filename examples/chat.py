"""Ask a question, and then a second one that needs the first. Run: python examples/chat.py [MODEL]"""

import sys

from quire import LLM, SamplingParams

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "demo")
sampling_params = SamplingParams(temperature=0.7, max_tokens=48)

messages = [{"role": "user", "content": "Where have you been all day?"}]
for follow_up in ("And what did you see there?", None):
    (output,) = llm.chat(messages, sampling_params, use_tqdm=False)
    answer = output.outputs[0].text.strip()
    print(f"user: {messages[-1]['content']}\nassistant: {answer}\n")
    if follow_up:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
