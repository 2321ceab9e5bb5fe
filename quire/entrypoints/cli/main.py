"""The `quire` command: finds the subcommand, runs it, and turns what went wrong into one line and an exit code.

Exit codes: 0 done, 1 the work failed, 2 wrong usage or configuration, 130 interrupted, 141 the reader of our output
went away. An error that is not ours to expect keeps its traceback: it is a bug.
"""

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO, cast

import quire
from quire.entrypoints.cli import bench, cache, chat, collect_env, complete, generate, plan, quantize, run_batch, serve
from quire.entrypoints.cli import bench_step as steps
from quire.entrypoints.cli import models as at_hand
from quire.entrypoints.cli.parser import Parser
from quire.entrypoints.cli.speculation import bench_spec
from quire.errors import ConfigError, InvalidRequestError, NotYetSupportedError, QuireError
from quire.utils.suggest import nearest

_USAGE_ERRORS = (ConfigError, InvalidRequestError, NotYetSupportedError)


def build_parser() -> Parser:
    """The whole command line; each leaf sets `run` (its function) and `parser` (itself, for error messages)."""
    parser = Parser(prog="quire", description="Run large language models.")
    parser.add_argument("-v", "-V", "--version", action="version", version=f"quire {quire.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_leaf(commands, "serve", "serve a model behind OpenAI's HTTP API", serve.add_flags, serve.run)
    _add_leaf(commands, "generate", "continue prompts", generate.add_flags, generate.run)
    _add_leaf(commands, "chat", "talk with a model in the terminal", chat.add_flags, chat.run)
    _add_leaf(commands, "complete", "continue prompts by a running server", complete.add_flags, complete.run)
    _add_leaf(commands, "run-batch", "answer a file of OpenAI's batch requests", run_batch.add_flags, run_batch.run)
    _add_leaf(commands, "plan", "say what a model would take, before loading it", plan.add_flags, plan.run)
    _add_leaf(commands, "quantize", "write a checkpoint in fewer bits", quantize.add_flags, quantize.run)
    bench_help = "measure latency, throughput or what drafts gain"
    measures = commands.add_parser("bench", help=bench_help).add_subparsers(metavar="WHAT", required=True)
    latency_help, throughput_help = "time one batch of prompts, run again and again", "time many requests given at once"
    _add_leaf(measures, "latency", latency_help, bench.add_latency_flags, bench.run_latency)
    _add_leaf(measures, "throughput", throughput_help, bench.add_throughput_flags, bench.run_throughput)
    spec_help = "compare ways of speculative decoding with plain decoding"
    _add_leaf(measures, "spec", spec_help, bench_spec.add_flags, bench_spec.run)
    step_help = "show where a step's time goes, kernel by kernel, beside this machine's limits"
    _add_leaf(measures, "step", step_help, steps.add_flags, steps.run)
    _add_leaf(measures, "serve", "put load on a running server", bench.add_serve_flags, bench.run_serve)
    _add_leaf(commands, "models", "list the hub's models that are on this disk", None, at_hand.list_models)
    _add_leaf(commands, "pull", "have a model of the hub on this disk", at_hand.add_name_flag, at_hand.pull)
    _add_leaf(commands, "rm", "remove a model of the hub from this disk", at_hand.add_name_flag, at_hand.remove)
    _add_leaf(commands, "show", "say what a model is, and what it would take", plan.add_flags, at_hand.show)
    _add_leaf(commands, "cache", "show or clear the packed weights kept on disk", cache.add_flags, cache.run)
    _add_leaf(commands, "collect-env", "show what a bug report should say", collect_env.add_flags, collect_env.run)
    _add_leaf(commands, "version", "show the version", None, lambda _: print(f"quire {quire.__version__}"))
    return parser


def _add_leaf(
    commands: argparse._SubParsersAction,
    name: str,
    help_text: str,
    add_flags: Callable[[argparse.ArgumentParser], None] | None,
    run: Callable[[argparse.Namespace], None],
) -> None:
    leaf = commands.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    leaf.set_defaults(run=run, parser=leaf)
    if add_flags is not None:
        add_flags(leaf)
        takes_model = any(action.dest == "model_argument" for action in leaf._actions)
        leaf.usage = leaf.usage or ("%(prog)s [MODEL] [options]" if takes_model else "%(prog)s [options]")


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Refuse a command that there is not, with the nearest that there is."""
    for name in arguments:
        action = next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None)
        if action is None or name.startswith("-"):
            return
        if name not in action.choices:
            close = nearest(name, action.choices)
            hint = f"Did you mean {close}?" if close else f"There are {', '.join(action.choices)}."
            parser.error(f"{action.metavar}: invalid choice: {name!r}. {hint}")
        parser = action.choices[name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` by default) and return its exit code."""
    _open_standard_streams()
    code, failure = 0, None
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
    except (OSError, SystemExit) as error:
        failure = error
    unwritten = _unwritten(sys.stdout) or failure
    _unwritten(sys.stderr)  # a log on a full disk is no failure
    if isinstance(unwritten, BrokenPipeError):
        return 141
    if isinstance(unwritten, OSError) and unwritten.errno == errno.ENOSPC:
        print(f"error: the output can't be written: {unwritten.strerror}.", file=sys.stderr)
        return 1
    if unwritten is not None:
        raise unwritten
    return code


def _run(arguments: Sequence[str]) -> int:
    parser = build_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if arguments[0] == "help":  # of a command, if one is named
        arguments = [*arguments[1:], "--help"]
    # What is read is text or refused, in any locale; a model may write what this terminal can't show.
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        _check_command(parser, arguments)
        namespace, unknown = parser.parse_known_args(arguments)
        if unknown:
            namespace.parser.refuse(unknown)
        namespace.run(namespace)
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, _USAGE_ERRORS) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def _open_standard_streams() -> None:
    """Give what was closed to /dev/null, or else a file or a socket would become standard input or output."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115  (it has the lowest free number)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _unwritten(stream: TextIO | None) -> OSError | None:
    """Why what a stream still holds can't be written, if so: it goes nowhere then, at the interpreter's end neither."""
    try:
        if stream is not None:
            stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), cast(TextIO, stream).fileno())
        return error
    return None
