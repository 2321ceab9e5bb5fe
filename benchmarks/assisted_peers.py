"""What drafts gain with other engines: their own assisted generation beside their own plain one, in turn.

    python benchmarks/assisted_peers.py prompts MODEL_DIR > prompts.jsonl      # in Quire's environment
    python benchmarks/assisted_peers.py transformers MODEL_DIR prompts.jsonl [--assistant DIR]
    python benchmarks/assisted_peers.py llamacpp MODEL.gguf prompts.jsonl [--assistant DRAFT.gguf]

The prompts are the two texts of `quire bench spec`, as token ids, continued as there: what copies greedily, what is
free drawn at temperature 1. One sequence at a time; each engine runs in an environment of its own, and nothing of
Quire is imported but for the prompts. Prints a JSON line a text: seconds a token plain and assisted, each the median
of the rounds, and the median of their ratios. Quire's figures of the same: quire bench spec MODEL_DIR --batch-sizes 1.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Generate = Callable[[dict[str, Any], int, int], list[int]]  # a prompt's record, how many tokens, and a seed


def print_prompts(model: str) -> None:
    """The texts, a JSON line each."""
    from quire.entrypoints.cli.speculation.bench_spec import COPIES, FREE
    from quire.text.tokenizer import load_tokenizer
    from quire.utils.hub import resolve_model_path

    tokenizer = load_tokenizer(str(resolve_model_path(model)))
    for name, text, temperature in (("copies", COPIES, 0.0), ("free", FREE, 1.0)):
        print(json.dumps({"text": name, "prompt": tokenizer.encode(text), "temperature": temperature}))


def with_transformers(args: argparse.Namespace) -> tuple[Generate, Generate]:
    """generate() without and with prompt lookup or an assistant model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # all tokens, as with ignore_eos
    options: dict[str, Any] = {"prompt_lookup_num_tokens": args.drafts}
    if args.assistant:
        assistant: Any = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=torch.bfloat16).eval()
        assistant.generation_config.num_assistant_tokens = args.drafts
        assistant.generation_config.eos_token_id = None
        options = {"assistant_model": assistant}

    def make(options: dict[str, Any]) -> Generate:
        @torch.inference_mode()
        def generate(record: dict[str, Any], num_tokens: int, seed: int) -> list[int]:
            torch.manual_seed(seed)
            ids = torch.tensor([record["prompt"]])
            drawn = {"do_sample": True, "temperature": record["temperature"], "top_k": 0, "top_p": 1.0}
            fixed = {"max_new_tokens": num_tokens, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
            fixed |= drawn if record["temperature"] else {"do_sample": False}
            return model.generate(ids, **fixed, **options)[0, ids.shape[1] :].tolist()

        return generate

    return make({}), make(options)


def with_llamacpp(args: argparse.Namespace) -> tuple[Generate, Generate]:
    """Llama.generate() without and with prompt lookup, or with the greedy drafts of a smaller model."""
    import numpy as np
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # pyright: ignore[reportMissingImports]

    options = {"n_ctx": 512, "n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False}

    def tokens(llama: Any, prompt: list[int], num_tokens: int, **sampling: Any) -> Iterator[int]:
        sampling = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, **sampling}
        for _, token_id in zip(range(num_tokens), llama.generate(prompt, **sampling), strict=False):
            yield token_id

    def make(draft: Any) -> Generate:
        llama = Llama(args.model, draft_model=draft, logits_all=draft is not None, **options)

        def generate(record: dict[str, Any], num_tokens: int, seed: int) -> list[int]:
            llama.reset()
            llama.set_seed(seed)
            return list(tokens(llama, record["prompt"], num_tokens, temp=record["temperature"]))

        return generate

    if not args.assistant:
        return make(None), make(LlamaPromptLookupDecoding(max_ngram_size=4, num_pred_tokens=args.drafts))
    assistant = Llama(args.assistant, **options)

    def draft(input_ids: Any, /, **_: Any) -> Any:  # what it has in common with the last call is not computed again
        return np.array(list(tokens(assistant, input_ids.tolist(), args.drafts, temp=0.0)), dtype=np.intc)

    return make(None), make(draft)


ENGINES = {"transformers": with_transformers, "llamacpp": with_llamacpp}


def measure(args: argparse.Namespace, record: dict[str, Any], pair: tuple[Generate, Generate]) -> dict[str, Any]:
    """One text's figures; runs in turn, after one of each that is not timed."""
    plain, assisted = (generate(record, args.tokens, 0) for generate in pair)
    seconds: list[tuple[float, float]] = []
    for _ in range(args.rounds):
        taken: list[float] = []
        for generate in pair:
            start = time.perf_counter()
            num_tokens = len(generate(record, args.tokens, 0))
            taken.append((time.perf_counter() - start) / num_tokens)
        seconds.append((taken[0], taken[1]))
    return {
        "engine": args.engine,
        "drafts": f"{args.drafts} of {args.assistant or 'prompt lookup'}",
        "text": record["text"],
        "tokens": [len(plain), len(assisted)],
        "plain_us_per_token": round(statistics.median(one for one, _ in seconds) * 1e6),
        "assisted_us_per_token": round(statistics.median(one for _, one in seconds) * 1e6),
        "speedup": round(statistics.median(one / other for one, other in seconds), 3),
        "same_tokens": plain == assisted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["prompts", *ENGINES])
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="?", help="what `prompts` printed")
    parser.add_argument("--drafts", type=int, default=3, help="most of a step (default: 3)")
    parser.add_argument("--assistant", help="a draft model, instead of prompt lookup")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of each output (default: 128)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.engine == "prompts":
        return print_prompts(args.model)
    if args.prompts is None:
        parser.error("name the file of prompts")
    pair = ENGINES[args.engine](args)
    for line in Path(args.prompts).read_text().splitlines():
        print(json.dumps(measure(args, json.loads(line), pair)), flush=True)
    return None


if __name__ == "__main__":
    main()
