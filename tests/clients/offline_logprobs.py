"""Loglikelihoods by the offline `LLM`: reads [[context ids, continuation ids], ...], prints [[sum, is greedy], ...].

`check_lm_eval.py` compares them with those that lm-eval made of the server's answers, summed in the same order.
"""

import json
import sys

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput


def main() -> None:
    requests = json.load(sys.stdin)
    llm = LLM("demo")
    prompts = [{"prompt_token_ids": context + continuation} for context, continuation in requests]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    json.dump(
        [scored(output, len(context)) for output, (context, _) in zip(outputs, requests, strict=True)], sys.stdout
    )


def scored(output: RequestOutput, num_context: int) -> tuple[float, bool]:
    """The sum over what comes after the context, and whether each token of it is the likeliest."""
    total, is_greedy = 0.0, True
    assert output.prompt_logprobs is not None
    for token_id, entry in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[num_context:]:
        assert entry is not None
        total += entry[token_id].logprob
        is_greedy &= entry[token_id].logprob == max(one.logprob for one in entry.values())
    return total, is_greedy


if __name__ == "__main__":
    main()
