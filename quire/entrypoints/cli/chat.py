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
from typing import Any

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli.flags import add_engine_flags, flag_name, options_given
from quire.entrypoints.cli.remote import RemoteError, Server, add_server_flags
from quire.entrypoints.cli.session import add_sampling_flags, load, sampling_given, sampling_params, stream
from quire.errors import ConfigError, InvalidRequestError

Answerer = Callable[[list[dict[str, Any]]], Generator[str, None, None]]  # messages -> the answer, piece by piece

_HELP = "/reset forgets the conversation, /system TEXT gives instructions, /quit (or Ctrl-D) leaves."


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire chat`."""
    parser.add_argument("--system", "--system-prompt", dest="system", metavar="TEXT", help="instructions to begin with")
    add_server_flags(parser)
    add_sampling_flags(parser, {"max_tokens": "most tokens of an answer (default: to the end of the context)"})
    add_engine_flags(parser)
    (model,) = (action for action in parser._actions if action.dest == "model_argument")
    model.help = "model directory, hub id or 'demo', to run it in this process (default: ask a server)"
    parser.epilog = f"In the conversation: {_HELP} Ctrl-C stops an answer."


def run(namespace: Namespace) -> None:
    """Talk until the input ends."""
    interactive = sys.stdin.isatty() and namespace.quick is None
    given = sampling_given(namespace)
    in_process = namespace.model_argument is not None or hasattr(namespace, "model")
    answerer, greeting = (_engine if in_process else _server)(namespace, given)
    conversation = Conversation(answerer, namespace.system, interactive)
    if namespace.quick is not None:
        return conversation.answer(namespace.quick)
    if interactive:
        print(f"{greeting} {_HELP}")
    for line in lines(interactive, "/quit or Ctrl-D leaves."):
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return None
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.reset(rest.strip() or None)
        elif command.startswith("/"):
            print(f"There is no command {command}. {_HELP}")
        else:
            with refusals_shown(interactive):
                conversation.answer(line)
    return None


class Conversation:
    """The messages so far; `answer` adds the user's and the model's."""

    def __init__(self, answerer: Answerer, system: str | None, interactive: bool) -> None:
        self._answerer = answerer
        self._interactive = interactive
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Start anew, with the instructions given, or else those there were."""
        self._system = system or getattr(self, "_system", None)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}] if self._system else []

    def answer(self, text: str) -> None:
        """Print the model's answer to `text` as it comes; Ctrl-C keeps what has come.

        Raises:
            InvalidRequestError: the conversation no longer fits in the context; `text` is then not part of it.
            RemoteError: the server can't answer; `text` is then not part of it.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        self.messages = [*asked, {"role": "assistant", "content": show(self._answerer(asked), self._interactive)}]


def _engine(namespace: Namespace, given: dict[str, Any]) -> tuple[Answerer, str]:
    """Answers of an engine in this process, and a greeting."""
    for name in ("url", "model_name", "api_key"):
        if hasattr(namespace, name):
            raise ConfigError(f"{flag_name(name)} is about a server, but a named MODEL runs here: leave one out.")
    llm, startup = load(namespace)
    params = sampling_params(llm, given, max_tokens=None)

    def answer(messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        prompt = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        with closing(stream(llm, {"prompt_token_ids": prompt}, params)) as outputs, _interrupts() as interrupted:
            for output in outputs:
                yield output.outputs[0].text
                if interrupted():
                    raise KeyboardInterrupt

    return answer, f"Ready in {startup:.1f} s."


def _server(namespace: Namespace, given: dict[str, Any]) -> tuple[Answerer, str]:
    """Answers of the server that the flags name, and a greeting."""
    for name in options_given(namespace, EngineArgs):
        if name != "seed":
            flag = flag_name(name)
            raise ConfigError(f"{flag} is about an engine in this process: name its MODEL, or leave out {flag}.")
    server = Server(namespace)
    seed = {"seed": namespace.seed} if hasattr(namespace, "seed") else {}

    def answer(messages: list[dict[str, Any]]) -> Generator[str, None, None]:
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
    except (InvalidRequestError, RemoteError) as error:
        if not interactive:
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
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Within, a first Ctrl-C is only noted, so that no engine step is torn apart; a second one interrupts."""
    noted: list[bool] = []

    def note(signum: int, frame: Any) -> None:
        if noted:
            signal.default_int_handler(signum, frame)
        noted.append(True)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, previous)
