"""A beginning that prompts share is computed once; texts stay the same. Run: python examples/prefix_caching.py"""

from quire import LLM, SamplingParams
from quire.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportAttributeAccessIssue]

PREFIX = (
    "There was once an old mill by a river, and in it lived a miller with three sons. The eldest wanted to be a "
    "soldier, the second wanted to be a merchant, and the youngest only wanted to hear stories. One evening the miller "
    "said to them: I have nothing to leave you but this mill, this cat and this old coat, so tell me what you want. "
)
QUESTIONS = ["The eldest said:", "The second said:", "The youngest said:", "And the cat said:"]
PROMPTS = [PREFIX + question for question in QUESTIONS]


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    plain = LLM(model="demo", enable_prefix_caching=False)
    expected = [output.outputs[0].text for output in plain.generate(PROMPTS, params)]
    del plain
    cleanup_dist_env_and_memory()

    cached = LLM(model="demo", enable_prefix_caching=True)
    cached.generate(PROMPTS[0], params)  # the prefix is in the cache from now on
    outputs = cached.generate(PROMPTS, params)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        num_prompt = len(output.prompt_token_ids or [])
        print(f"{question} {output.outputs[0].text!r} ({output.num_cached_tokens} of {num_prompt} tokens were cached)")
    same = [output.outputs[0].text for output in outputs] == expected
    print(f"Generated texts are the same: {same}")


if __name__ == "__main__":
    main()
