"""`quire chat`: a conversation in the terminal, each answer printed as it comes.

`quire chat MODEL` runs the model in this process, `quire chat` asks a server; the conversation is the same. Lines
starting with a slash are commands. With piped input it prints the answers only. Ctrl-C ends the answer under way,
Ctrl-D the conversation.
"""

import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from threading import Event
from typing import Any

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli import session
from quire.entrypoints.cli.flags import add_engine_flags, flag_name, options_given
from quire.errors import ConfigError, EngineDeadError, QuireError

Messages = list[dict[str, Any]]
Answerer = Callable[[Messages], Generator[str, None, None]]  # gives the answer piece by piece

_HELP = "/reset forgets the conversation, /system TEXT gives instructions, /quit (or Ctrl-D) leaves."


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire chat`."""
    parser.add_argument("--system", "--system-prompt", dest="system", metavar="TEXT", help="instructions to begin with")
    session.add_server_flags(parser)
    session.add_sampling_flags(parser, {"max_tokens": "most tokens of an answer (default: to the end of the context)"})
    model_help = "model directory, hub id or 'demo', to run it in this process (default: ask a server)"
    add_engine_flags(parser, model_help=model_help)
    parser.epilog = f"In the conversation: {_HELP} Ctrl-C stops an answer."


def run(namespace: Namespace) -> None:
    """Talk until the input ends."""
    interactive = sys.stdin.isatty() and namespace.quick is None
    given = session.sampling_given(namespace)
    in_process = namespace.model_argument is not None or hasattr(namespace, "model")
    answerer, greeting = (_engine if in_process else _server)(namespace, given)
    start = _message("system", namespace.system) if namespace.system else []  # of every conversation
    if namespace.quick is not None:
        show(answerer(start + _message("user", namespace.quick)), interactive)
        return
    if interactive:
        print(f"{greeting} {_HELP}")
    messages = start
    for line in lines(interactive, "/quit or Ctrl-D leaves."):
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command in ("/reset", "/system"):
            start = _message("system", rest.strip()) if rest.strip() else start
            messages = start
        elif command.startswith("/"):
            print(f"There is no command {command}. {_HELP}")
        else:
            with refusals_shown(interactive):
                asked = messages + _message("user", line)
                messages = asked + _message("assistant", show(answerer(asked), interactive))


def _message(role: str, content: str) -> Messages:
    return [{"role": role, "content": content}]


def _engine(namespace: Namespace, given: dict[str, Any]) -> tuple[Answerer, str]:
    """Answers of an engine in this process, and a greeting."""
    for name in {"url", "model_name", "api_key"} & vars(namespace).keys():
        raise ConfigError(f"{flag_name(name)} is about a server, but a named MODEL runs here: leave one out.")
    llm, startup = session.load(namespace)
    params = session.sampling_params(llm, given, max_tokens=None)

    def answer(messages: Messages) -> Generator[str, None, None]:
        prompt = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        with (
            closing(session.stream(llm, {"prompt_token_ids": prompt}, params)) as outputs,
            _interrupts() as interrupted,
        ):
            for output in outputs:
                yield output.outputs[0].text
                if interrupted.is_set():
                    raise KeyboardInterrupt

    return answer, f"Ready in {startup:.1f} s."


def _server(namespace: Namespace, given: dict[str, Any]) -> tuple[Answerer, str]:
    """Answers of the server that the flags name, and a greeting."""
    for name in options_given(namespace, EngineArgs).keys() - {"seed"}:
        flag = flag_name(name)
        raise ConfigError(f"{flag} is about an engine in this process: name its MODEL, or leave out {flag}.")
    from quire.entrypoints.cli.remote import Server

    server = Server.of_flags(namespace)
    seed = {"seed": namespace.seed} if hasattr(namespace, "seed") else {}

    def answer(messages: Messages) -> Generator[str, None, None]:
        return server.texts("/chat/completions", {"messages": messages, **given, **seed})

    return answer, f"Talking with {server.model}."


def show(pieces: Generator[str, None, None], interactive: bool) -> str:
    """Print the pieces of a text as they come, and return it; at a terminal, Ctrl-C ends it there."""
    shown: list[str] = []
    with closing(pieces):
        try:
            for piece in pieces:
                shown.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(" [stopped]", end="")
    print(flush=True)
    return "".join(shown)


@contextmanager
def refusals_shown(interactive: bool) -> Iterator[None]:
    """Within, a request that fails is reported and no more, at a terminal; elsewhere it ends the command."""
    try:
        yield
    except QuireError as error:
        if not interactive or isinstance(error, EngineDeadError):
            raise
        print(f"error: {error}", file=sys.stderr)


def lines(interactive: bool, hint: str) -> Iterator[str]:
    """Non-empty lines of the user, to the end of the input; `hint` is shown at a Ctrl-C between them."""
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives `input` its line editing)
    while True:
        try:
            line = input("\n> ") if interactive else sys.stdin.readline()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{hint}")
            continue
        if not interactive and not line:
            return
        if line.strip():
            yield line.strip()


@contextmanager
def _interrupts() -> Iterator[Event]:
    """Within, a first Ctrl-C is only noted, so that no engine step is torn apart; a second one interrupts."""
    noted = Event()

    def note(*_: object) -> None:
        noted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, previous)
