"""What the subcommands share: an `LLM` made from the flags, sampling flags, and one request streamed step by step.

torch comes in here and only here, inside `load`, once the command line is known to be in order.
"""

import itertools
import random
import time
import typing
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from quire.entrypoints.cli.flags import add_typed_flag, engine_args_from
from quire.errors import InvalidRequestError
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.utils.suggest import unknown_name_message

if TYPE_CHECKING:
    from quire.entrypoints.llm import LLM

DEFAULT_MAX_TOKENS = 128  # to continue a prompt
_SAMPLING_HELP = {
    "max_tokens": f"most tokens to generate for each prompt (default: {DEFAULT_MAX_TOKENS})",
    "temperature": "0 always takes the likeliest token; higher is more random",
    "top_p": "sample from the likeliest tokens that make up this share of the probability",
    "top_k": "sample from the k likeliest tokens; 0 for all",
    "min_p": "drop tokens less likely than this share of the likeliest one",
    "presence_penalty": "against tokens that have come already",
    "frequency_penalty": "against tokens by how often they have come",
    "repetition_penalty": "against tokens of the prompt and the output; 1 is none",
    "min_tokens": "generate at least this many tokens",
    "ignore_eos": "go on after the end-of-sequence token",
}
_request_numbers = itertools.count()


def load(namespace: Namespace) -> tuple["LLM", float]:
    """The LLM that the engine flags describe, and the seconds it took (importing torch included)."""
    args = engine_args_from(namespace)
    start = time.perf_counter()
    from quire import LLM

    return LLM(**vars(args)), time.perf_counter() - start


def random_prompts(llm: "LLM", count: int, length: int) -> list[Any]:
    """`count` prompts of `length` random token ids, the same for the same engine seed."""
    draw, vocabulary = random.Random(llm.model_config.seed), range(llm.model_config.vocab_size)
    return [{"prompt_token_ids": draw.choices(vocabulary, k=length)} for _ in range(count)]


def add_sampling_flags(parser: ArgumentParser, help_texts: Mapping[str, str] | None = None) -> None:
    """Flags for the sampling parameters that a person wants at a terminal; `--seed` is an engine flag already.

    `help_texts` holds further fields of `SamplingParams`, or another help text for one of the usual.
    """
    group = parser.add_argument_group("sampling (defaults: the model's generation_config.json, then these)")
    hints = typing.get_type_hints(SamplingParams)
    defaults = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    for name, help_text in (_SAMPLING_HELP | dict(help_texts or {})).items():
        add_typed_flag(group, name, hints[name], None if name == "max_tokens" else defaults[name], help_text)
    group.add_argument("--stop", action="append", default=SUPPRESS, metavar="TEXT", help="end before this text; repeat")


def add_server_flags(parser: ArgumentParser) -> None:
    """The flags that say which server is asked (without defaults in the namespace), and the one that asks once."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", default=SUPPRESS, help="the server (default: http://localhost:8000/v1)")
    group.add_argument("--model-name", default=SUPPRESS, metavar="NAME", help="default: the server's first model")
    help_text = "default: $QUIRE_API_KEY, or else $OPENAI_API_KEY"
    group.add_argument("--api-key", default=SUPPRESS, metavar="KEY", help=help_text)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask this once, print the answer and leave")


def sampling_given(namespace: Namespace) -> dict[str, Any]:
    """The sampling flags that the user gave, checked while no time has gone into loading a model yet.

    Raises:
        InvalidRequestError: a value is out of its range.
    """
    given = {name: value for name, value in vars(namespace).items() if name in SamplingParams.__struct_fields__}
    given.pop("seed", None)  # the engine's, which keys requests without a seed
    SamplingParams(**given)
    return given


def set_parameter(given: dict[str, Any], name: str, text: str) -> None:
    """Read the value of a sampling parameter into `given`; an empty text takes it out.

    Raises:
        InvalidRequestError: there is no such parameter, or the value is none of its.
    """
    name = name.lstrip("-").replace("-", "_")
    if name not in (known := [*_SAMPLING_HELP, "seed", "stop"]):
        raise InvalidRequestError(unknown_name_message("/set", [name], known))
    try:
        read = {name: [text] if name == "stop" else text} if text else {}
        value = getattr(msgspec.convert(read, SamplingParams, strict=False), name)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{name} can't be {text!r}: {str(error).rstrip('.')}.") from None
    given.pop(name, None)
    given.update({name: value} if text else {})


def sampling_params(llm: "LLM", given: dict[str, Any], max_tokens: int | None) -> SamplingParams:
    """The flags given, over the model's own defaults; `max_tokens` where neither says how many."""
    defaults = llm.get_default_sampling_params()
    if defaults.max_tokens == SamplingParams().max_tokens:
        given = {"max_tokens": max_tokens} | given
    return msgspec.structs.replace(defaults, **given)


def stream(llm: "LLM", prompt: Any, params: SamplingParams) -> Generator[RequestOutput, None, None]:
    """Run one request and yield its outputs as they come, each holding only what is new.

    Closing the iterator before its end aborts the request.

    Raises:
        InvalidRequestError: the prompt or the parameters are refused.
    """
    engine, request_id = llm.llm_engine, f"stream-{next(_request_numbers)}"
    engine.add_request(request_id, prompt, msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA))
    finished = False
    try:
        while not finished:
            for output in engine.step():
                if output.request_id == request_id:
                    finished = output.finished
                    yield output
    finally:
        if not finished:
            engine.abort_request(request_id)
            engine.discard_outputs([request_id])
