"""Two engines, each with a copy of the model, behind one LLM. Run: python examples/data_parallel.py -dp 2

vLLM's example starts a process for each rank and shares out the prompts by hand; here `data_parallel_size` does both.
"""

from quire import LLM, EngineArgs, SamplingParams
from quire.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = [
    "Hello, my name is",
    "The president of the club is",
    "The capital of the kingdom is",
    "The future of the inn is",
]


def main() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="Data parallel inference"))
    parser.set_defaults(model="demo", max_model_len=128, data_parallel_size=2)
    llm = LLM(**vars(parser.parse_args()))
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=(12, 16)[n % 2]) for n in range(24)]
    outputs = llm.generate(PROMPTS * 6, params, use_tqdm=False)
    for output in outputs[:4]:
        print(f"Prompt: {output.prompt!r}, generated text: {output.outputs[0].text!r}")
    alone = LLM(model="demo", max_model_len=128).generate(PROMPTS, params[:4], use_tqdm=False)
    same = [output.outputs[0].text for output in alone] == [output.outputs[0].text for output in outputs[:4]]
    print(f"{len(outputs)} answers; the same as those of one engine: {same}")


if __name__ == "__main__":
    main()
