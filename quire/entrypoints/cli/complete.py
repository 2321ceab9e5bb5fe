"""`quire complete`: a server continues texts, one after the other at a terminal, or what is piped in as one.

`quire generate` does the same with an engine in this process.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable

from quire.entrypoints.cli.files import read_text
from quire.entrypoints.cli.flags import add_typed_flag
from quire.entrypoints.cli.session import DEFAULT_MAX_TOKENS, add_sampling_flags, add_server_flags, sampling_given
from quire.entrypoints.cli.terminal import Keyboard, refusals_shown, show
from quire.errors import ConfigError


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire complete`."""
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_typed_flag(parser, "seed", int, None, "makes the random choices the same each time")
    parser.epilog = "`quire generate MODEL` continues a text without a server."


def run(namespace: Namespace) -> None:
    """Continue prompts until the input ends."""
    interactive = sys.stdin.isatty() and namespace.quick is None
    body = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling_given(namespace)}
    if hasattr(namespace, "seed"):
        body["seed"] = namespace.seed
    from quire.entrypoints.cli.remote import Server

    server = Server.of_flags(namespace)
    prompts: Iterable[str]
    if interactive:
        print(f"Writing with {server.model}. A line is a prompt; Ctrl-C stops its text, Ctrl-D leaves.")
        prompts = Keyboard(interactive, "Ctrl-D leaves.")
    else:
        prompts = [read_text("-").removesuffix("\n") if namespace.quick is None else namespace.quick]
        if not prompts[0]:
            raise ConfigError("no prompt: give --quick TEXT, or pipe one in.")
    for prompt in prompts:
        with refusals_shown(interactive):
            show(server.texts("/completions", {"prompt": prompt, **body}), interactive)
