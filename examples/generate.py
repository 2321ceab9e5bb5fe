"""Every option of the engine as a flag, and some of sampling. Run: python examples/generate.py --max-tokens 24 -O3"""

from typing import Any

from quire import LLM, EngineArgs
from quire.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = ["The captain looked at the sea and", "In the garden there was", "She opened the letter, which said"]


def create_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(description="Continue prompts.")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="demo", max_model_len=256)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=24)
    sampling.add_argument("--temperature", type=float)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    return parser


def main(args: dict[str, Any]) -> None:
    given = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = LLM(**args)
    params = llm.get_default_sampling_params()  # the model's own
    for name, value in given.items():
        if value is not None:
            setattr(params, name, value)
    for output in llm.generate(PROMPTS, params):
        print(f"Prompt: {output.prompt!r}, generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
