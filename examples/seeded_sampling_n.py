"""Several continuations of one prompt, the same in every run and in any batch, with their log-probabilities.

Run: python examples/seeded_sampling_n.py [MODEL]
"""

import sys

from quire import LLM, SamplingParams

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "demo")
prompt = "The captain looked at the sea and said"
sampling_params = SamplingParams(n=3, temperature=0.9, seed=42, max_tokens=32, logprobs=0)

(alone,) = llm.generate(prompt, sampling_params, use_tqdm=False)
for completion in alone.outputs:
    print(f"[{completion.index}] {completion.cumulative_logprob:.3f} {completion.text!r}")

# The same request among others: the same tokens and the same log-probabilities, bit for bit.
together = llm.generate([prompt, "Far away,", "One evening"], sampling_params, use_tqdm=False)[0]
same = [a.token_ids == b.token_ids for a, b in zip(alone.outputs, together.outputs, strict=True)]
equal = [a.cumulative_logprob == b.cumulative_logprob for a, b in zip(alone.outputs, together.outputs, strict=True)]
print("tokens equal in a batch:", all(same), "- logprobs equal:", all(equal))
