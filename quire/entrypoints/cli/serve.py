"""`quire serve`: the OpenAI-compatible server, until a signal ends it.

The web libraries and the engine come in once the command line is known to be in order.
"""

import os
import signal
from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import Any

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli.flags import add_engine_flags, add_option_flags, engine_args_from, flag_name, options_given
from quire.entrypoints.server.catalog import Catalog, is_catalog, read_catalog
from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError
from quire.utils.logs import logger


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire serve`."""
    config_help = "YAML file of further flags, by name; those given beside it go first"
    parser.add_argument("--config", metavar="FILE", default=SUPPRESS, help=config_help)
    add_option_flags(parser.add_argument_group("server options"), ServerArgs)
    add_engine_flags(parser)
    parser.usage = "%(prog)s [MODEL ...] [options]"
    models = next(action for action in parser._actions if action.dest == "model_argument")
    models.nargs, models.help = "*", "model directories or hub ids (default: the bundled 'demo')"


def run(namespace: Namespace) -> None:
    """Serve."""
    if hasattr(namespace, "config"):  # add what it has and no flag says
        for name, value in vars(namespace.parser.read_file(namespace.config)).items():
            if not hasattr(namespace, name) and not (name == "model" and namespace.model_argument):
                setattr(namespace, name, value)
    given, models = options_given(namespace, ServerArgs), list(namespace.model_argument)
    namespace.model_argument = models[0] if models else None
    refuse_swallowed_model(namespace, given)
    if "api_key" not in given and (key := os.environ.get("QUIRE_API_KEY") or os.environ.get("VLLM_API_KEY")):
        given["api_key"] = [key]
    if unread := ", ".join(sorted(name for name in os.environ if name.startswith("VLLM_") and name != "VLLM_API_KEY")):
        logger.warning("%s in the environment: no effect here, where options are flags; see --help.", unread)
    args, engine_args = ServerArgs(**given), engine_args_from(namespace)
    if len(models) > 1 and hasattr(namespace, "model"):
        raise ConfigError(f"the models are named twice: {len(models)} of them and --model {namespace.model!r}.")
    # Importing and loading take seconds, and process 1 of a container has no default handlers.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    from quire.entrypoints.server.launch import serve

    if not models and (hasattr(namespace, "model") or args.models_dir is None):
        models = [engine_args.model]
    if is_catalog(models, args):
        serve(args, engine_args, _catalog(models, args, engine_args))
    else:
        serve(args, engine_args)


def _catalog(models: list[str], args: ServerArgs, engine_args: EngineArgs) -> Catalog:
    """The models, each of which can be loaded where it is alone."""
    from quire.entrypoints.cli.plan import make_plan

    catalog = read_catalog(models, args, engine_args)
    for model in catalog.models:
        if sum(model.room) > catalog.limits.memory and (why := make_plan(model.args).refusal):
            why += " 'quire plan' says what would fit."
            raise ConfigError(f"the model {model.name!r} can never be loaded here: {why}")
    return catalog


def refuse_swallowed_model(namespace: Namespace, given: dict[str, Any]) -> None:
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
