"""The same tokens in every run and in every batch, without a switch for it. Run: python examples/reproducibility.py"""

from quire import LLM, SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The president of the club is",
    "The capital of the kingdom is",
    "The future of the inn is",
]


def main() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=7)
    texts: list[list[str]] = []
    for options in ({}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 16}, {"seed": 3}):
        llm = LLM(model="demo", max_model_len=128, **options)
        texts.append([output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)])
    for prompt, text in zip(PROMPTS, texts[0], strict=True):
        print(f"Prompt: {prompt!r}\nGenerated text: {text!r}")
    print(f"the same in other batches, chunks and engines: {all(each == texts[0] for each in texts)}")


if __name__ == "__main__":
    main()
