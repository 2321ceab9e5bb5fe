"""What speculative decoding gains: time a token with and without, on text that copies and on text that does not.

    python benchmarks/speculation.py MODEL [--batch 1 8] [--tokens 128] [--rounds 5] CONFIG...

Each CONFIG is a speculative_config, as JSON. CPU time and wall time, each the least of the rounds, in turn on one
machine; what copies is greedy, what does not is drawn at temperature 1. All give the same tokens, which is checked.
"""

import argparse
import json
import time
from typing import Any

from quire import LLM, SamplingParams
from quire.protocol.stats import SpeculationStats

COPY = """Edit this text: put "ship" for "boat", and change nothing else.

The captain said that the boat would sail at dawn, and the mate said that it would not. Whoever was on the boat went to
sleep, but for the cook, who sat on the deck and looked at the harbour. In the morning the boat was gone.

The same text, edited:

The captain said that the ship would sail at dawn, and the mate said that it would not. Whoever was on the ship went to
sleep, but for the cook, who sat on the deck"""
FREE = "Once upon a time, in a small town by the sea,"


def tokens_of(llm: LLM, prompt: str, batch: int, num_tokens: int) -> tuple[float, float, list[Any]]:
    """CPU and wall seconds a token, and the tokens."""
    temperature = 1.0 if prompt is FREE else 0.0  # greedy, small models repeat themselves: that would be a copy, too
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=num_tokens, ignore_eos=True) for i in range(batch)
    ]
    start, begin = time.process_time(), time.perf_counter()
    outputs = llm.generate([prompt] * batch, params, use_tqdm=False)
    cpu, wall = time.process_time() - start, time.perf_counter() - begin
    return cpu / batch / num_tokens, wall / batch / num_tokens, [list(one.outputs[0].token_ids) for one in outputs]


def share_of(llm: LLM, before: SpeculationStats | None) -> str:
    """Drafts accepted since then."""
    after = llm.get_metrics().speculation
    if before is None or after is None:
        return "-"
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return f"{num_accepted} of {after.num_draft_tokens - before.num_draft_tokens}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("configs", nargs="+", metavar="CONFIG")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    common: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 512, "num_kv_blocks": 256}
    engines = {text: LLM(args.model, speculative_config=json.loads(text), **common) for text in args.configs}
    engines = {"none": LLM(args.model, **common)} | engines
    print("| configuration | text | batch | CPU us a token | gain, CPU | gain, wall | accepted of drafted |")
    print("|---|---|---|---|---|---|---|")
    for name, prompt in (("copies", COPY), ("free", FREE)):
        for batch in args.batch:
            before = {text: llm.get_metrics().speculation for text, llm in engines.items()}
            found: dict[str, list[tuple[float, float, list[Any]]]] = {text: [] for text in engines}
            for _ in range(args.rounds):
                for text, llm in engines.items():
                    found[text].append(tokens_of(llm, prompt, batch, args.tokens))
            cpu, wall = min(one[0] for one in found["none"]), min(one[1] for one in found["none"])
            for text, rounds in found.items():
                assert rounds[0][2] == found["none"][0][2], "drafts changed an answer"
                own, own_wall = min(one[0] for one in rounds), min(one[1] for one in rounds)
                gains = f"{own * 1e6:.0f} | {cpu / own:.2f} | {wall / own_wall:.2f}"
                print(
                    f"| `{text}` | {name} | {batch} | {gains} | {share_of(engines[text], before[text])} |", flush=True
                )


if __name__ == "__main__":
    main()
