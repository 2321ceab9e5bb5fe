"""Speculative decoding: several ways of drafting, and the very same tokens each time.

python examples/speculation.py
"""

from quire import LLM, SamplingParams

STORY = "The captain said that the boat would sail at dawn, and the mate said that the boat would not sail at dawn. "
WAYS = [
    {"method": "ngram", "num_speculative_tokens": 4},  # what followed the same tokens before
    {"model": "demo-draft", "num_speculative_tokens": 3},  # a smaller model
    {"model": "demo-medusa", "speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"},
    {"model": "demo-eagle", "num_speculative_tokens": 3},  # a layer that goes on from the model's hidden states
]


def main() -> None:
    params = [SamplingParams(temperature=t, seed=1, max_tokens=96, ignore_eos=True) for t in (0, 0.8)]
    prompts = [STORY * 2, "Once upon a time"]
    plain = [one.outputs[0].token_ids for one in LLM("demo").generate(prompts, params, use_tqdm=False)]
    for way in WAYS:
        # adaptive=False drafts always; without it drafts are as many as pay here.
        llm = LLM("demo", speculative_config=way | {"adaptive": False})
        found = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        stats = llm.get_metrics().speculation
        assert stats is not None
        print(f"{way.get('model', 'prompt lookup'):14} the same tokens: {found == plain}; ", end="")
        print(f"{stats.num_accepted_tokens / max(1, stats.num_drafts):.2f} tokens accepted of each time drafted")


if __name__ == "__main__":
    main()
