"""`quire serve`: the OpenAI-compatible server, until a signal ends it.

The web libraries and the engine come in once the command line is known to be in order.
"""

import os
import signal
from argparse import ArgumentParser, Namespace

from quire.config.server import ServerArgs
from quire.entrypoints.cli.flags import add_engine_flags, add_option_flags, engine_args_from, options_given


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire serve`."""
    add_option_flags(parser.add_argument_group("server options"), ServerArgs)
    add_engine_flags(parser)


def run(namespace: Namespace) -> None:
    """Serve."""
    given = options_given(namespace, ServerArgs)
    if "api_key" not in given and (key := os.environ.get("QUIRE_API_KEY")):
        given["api_key"] = [key]
    args, engine_args = ServerArgs(**given), engine_args_from(namespace)
    # Importing and loading take seconds, and process 1 of a container has no default handlers.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    from quire.entrypoints.server.launch import serve

    serve(args, engine_args)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(0)
