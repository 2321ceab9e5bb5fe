"""`quire complete`: a server continues texts, one after the other at a terminal, or what is piped in as one.

`quire generate` does the same with an engine in this process.
"""

import sys
import typing
from argparse import ArgumentParser, Namespace

from quire.entrypoints.cli.chat import lines, refusals_shown, show
from quire.entrypoints.cli.flags import add_typed_flag
from quire.entrypoints.cli.remote import Server, add_server_flags
from quire.entrypoints.cli.session import add_sampling_flags, sampling_given
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams

_DEFAULT_MAX_TOKENS = 128


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire complete`."""
    add_server_flags(parser)
    help_text = f"most tokens to generate for each prompt (default: {_DEFAULT_MAX_TOKENS})"
    add_sampling_flags(parser, {"max_tokens": help_text})
    seed_hint = typing.get_type_hints(SamplingParams)["seed"]
    add_typed_flag(parser, "seed", seed_hint, None, "makes the random choices the same each time")
    parser.epilog = "`quire generate MODEL` continues a text without a server."


def run(namespace: Namespace) -> None:
    """Continue prompts until the input ends."""
    interactive = sys.stdin.isatty() and namespace.quick is None
    body = {"max_tokens": _DEFAULT_MAX_TOKENS, **sampling_given(namespace)}
    if hasattr(namespace, "seed"):
        body["seed"] = namespace.seed
    server = Server(namespace)
    if interactive:
        print(f"Writing with {server.model}. A line is a prompt; Ctrl-C stops its text, Ctrl-D leaves.")
        prompts = lines(interactive, "Ctrl-D leaves.")
    else:
        prompts = [_only_prompt(namespace)]
    for prompt in prompts:
        with refusals_shown(interactive):
            show(server.texts("/completions", {"prompt": prompt, **body}), interactive)


def _only_prompt(namespace: Namespace) -> str:
    """The prompt of `--quick`, or all of standard input.

    Raises:
        ConfigError: it is empty, or no text.
    """
    try:
        prompt = sys.stdin.read().removesuffix("\n") if namespace.quick is None else namespace.quick
    except UnicodeDecodeError:
        raise ConfigError("the prompt is not UTF-8 text.") from None
    if not prompt:
        raise ConfigError("no prompt: give --quick TEXT, or pipe one in.")
    return prompt
