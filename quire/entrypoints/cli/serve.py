"""`quire serve`: the OpenAI-compatible server, until a signal ends it.

The web libraries and the engine come in once the command line is known to be in order.
"""

import os
import signal
from argparse import ArgumentParser, Namespace
from typing import Any

from quire.entrypoints.cli.flags import add_engine_flags, add_option_flags, engine_args_from, flag_name, options_given
from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire serve`."""
    add_option_flags(parser.add_argument_group("server options"), ServerArgs)
    add_engine_flags(parser)


def run(namespace: Namespace) -> None:
    """Serve."""
    given = options_given(namespace, ServerArgs)
    _refuse_swallowed_model(namespace, given)
    if "api_key" not in given and (key := os.environ.get("QUIRE_API_KEY")):
        given["api_key"] = [key]
    args, engine_args = ServerArgs(**given), engine_args_from(namespace)
    # Importing and loading take seconds, and process 1 of a container has no default handlers.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    from quire.entrypoints.server.launch import serve

    serve(args, engine_args)


def _refuse_swallowed_model(namespace: Namespace, given: dict[str, Any]) -> None:
    """`--api-key KEY /models/llama`: a flag that takes several values took the model for one of them."""
    if namespace.model_argument is not None or hasattr(namespace, "model"):
        return
    for name, values in given.items():
        if not isinstance(values, list) or len(values) < 2:
            continue
        last = values[-1]
        if os.path.exists(last) or (name in ("api_key", "served_model_name") and "/" in last):
            flag = flag_name(name)
            secret = "its last value" if name == "api_key" and not os.path.exists(last) else repr(last)
            raise ConfigError(f"{flag} took {secret}, which looks like the model: give the model before {flag}.")


def _leave(number: int, frame: object) -> None:
    raise SystemExit(0)
