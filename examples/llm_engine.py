"""A loop of one's own around the engine, and its settings. Run: python examples/llm_engine.py --max-num-seqs 2"""

import argparse

from quire import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from quire.utils.argparse_utils import FlexibleArgumentParser

REQUESTS = [
    ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
    ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
]


def process_requests(engine: LLMEngine, requests: list[tuple[str, SamplingParams]]) -> None:
    """Add a request before each step, while there are any."""
    number = 0
    while requests or engine.has_unfinished_requests():
        if requests:
            prompt, params = requests.pop(0)
            engine.add_request(str(number), prompt, params)
            number += 1
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            if output.finished:
                print(f"{output.request_id}: {[part.text for part in output.outputs]}")


def main(args: argparse.Namespace) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    model, cache = engine.model_config, engine.vllm_config.cache_config
    print(f"{model.model}: {model.hf_config.model_type}, {model.dtype}, {model.get_vocab_size()} tokens")
    print(f"context of {model.max_model_len} tokens; {cache.num_gpu_blocks} blocks of {cache.block_size} tokens")
    process_requests(engine, list(REQUESTS))


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="Drive the engine step by step."))
    main(parser.parse_args())
