"""What drafts gain with other engines: their own assisted generation beside their own plain one, in turn.

    python benchmarks/assisted_peers.py transformers MODEL_DIR PROMPTS.jsonl [--lookup 3] [--assistant DIR]
    python benchmarks/assisted_peers.py llamacpp MODEL.gguf PROMPTS.jsonl [--lookup 3]

PROMPTS.jsonl has {"prompt": [token ids]} a line. For Quire's figures on the same: quire bench spec MODEL_DIR --dataset
PROMPTS.jsonl. Greedy, one sequence at a time; each engine runs in an environment of its own, so nothing of Quire is
imported. Prints a JSON line a prompt: seconds a token plain and assisted, each the median, and the median ratio.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[int], int], list[int]]


def with_transformers(args: argparse.Namespace) -> tuple[Generate, Generate]:
    """generate() without and with prompt lookup or an assistant model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    options: dict[str, Any] = {"prompt_lookup_num_tokens": args.lookup}
    if args.assistant:
        assistant: Any = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=torch.bfloat16).eval()
        assistant.generation_config.num_assistant_tokens = args.lookup
        options = {"assistant_model": assistant}

    def make(options: dict[str, Any]) -> Generate:
        @torch.inference_mode()
        def generate(prompt: list[int], num_tokens: int) -> list[int]:
            ids = torch.tensor([prompt])
            fixed = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
            return model.generate(ids, attention_mask=torch.ones_like(ids), **fixed, **options)[
                0, len(prompt) :
            ].tolist()

        return generate

    return make({}), make(options)


def with_llamacpp(args: argparse.Namespace) -> tuple[Generate, Generate]:
    """Llama.generate() without and with prompt lookup."""
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # pyright: ignore[reportMissingImports]

    def make(draft: Any) -> Generate:
        options = {"n_ctx": 512, "n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False}
        llama = Llama(args.model, draft_model=draft, logits_all=draft is not None, **options)

        def generate(prompt: list[int], num_tokens: int) -> list[int]:
            llama.reset()
            found: list[int] = []
            for token_id in llama.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
                found.append(token_id)
                if len(found) == num_tokens:
                    break
            return found

        return generate

    return make(None), make(LlamaPromptLookupDecoding(max_ngram_size=4, num_pred_tokens=args.lookup))


ENGINES = {"transformers": with_transformers, "llamacpp": with_llamacpp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--lookup", type=int, default=3, help="drafts a step")
    parser.add_argument("--assistant", help="a draft model, instead of prompt lookup (transformers)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    plain, assisted = ENGINES[args.engine](args)
    for number, line in enumerate(Path(args.prompts).read_text().splitlines()):
        prompt = json.loads(line)["prompt"]
        same = plain(prompt, args.tokens) == assisted(prompt, args.tokens)
        seconds: list[tuple[float, float]] = []
        for _ in range(args.rounds):
            pair = []
            for generate in (plain, assisted):
                start = time.perf_counter()
                generate(prompt, args.tokens)
                pair.append((time.perf_counter() - start) / args.tokens)
            seconds.append((pair[0], pair[1]))
        figures = {
            "engine": args.engine,
            "prompt": number,
            "plain_us_per_token": round(statistics.median(one for one, _ in seconds) * 1e6),
            "assisted_us_per_token": round(statistics.median(one for _, one in seconds) * 1e6),
            "speedup": round(statistics.median(one / other for one, other in seconds), 3),
            "same_tokens": same,
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
