"""Functions that change the logits of a request, called for each token. Run: python examples/logits_processor.py

vLLM's processors follow a whole batch; here each belongs to its request, so that no neighbour can change what it sees.
"""

import torch

from quire import LLM, SamplingParams


class OnlyToken:
    """Leaves one token."""

    def __init__(self, target_token: int) -> None:
        self.target_token = target_token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = logits[self.target_token].item()
        logits[:] = float("-inf")
        logits[self.target_token] = kept
        return logits


def no_repeats(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """No token of the prompt or the output comes again."""
    logits[[*prompt_ids, *output_ids]] = float("-inf")
    return logits


def main() -> None:
    llm = LLM(model="demo", max_model_len=128)
    word = llm.get_tokenizer().encode(" sea", add_special_tokens=False)[-1]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=12, logits_processors=[OnlyToken(word)]),
        SamplingParams(temperature=0.0, max_tokens=12, logits_processors=[no_repeats]),
    ]
    outputs = llm.generate(["The ship sailed over the"] * 3, params, use_tqdm=False)
    for name, output in zip(("plain", "one token", "no repeats"), outputs, strict=True):
        print(f"{name:10} {output.outputs[0].text!r}")
    assert set(outputs[1].outputs[0].token_ids) == {word}
    ids = list(outputs[2].outputs[0].token_ids)
    print(f"all tokens are different: {len(ids) == len(set(ids))}")


if __name__ == "__main__":
    main()
