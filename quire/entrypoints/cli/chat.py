"""`quire chat MODEL`: a conversation in the terminal, each answer printed as it comes.

Lines starting with a slash are commands. With piped input it prints the answers only. Ctrl-C ends the answer under
way, Ctrl-D the conversation.
"""

import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from quire.entrypoints.cli.flags import add_engine_flags
from quire.entrypoints.cli.session import add_sampling_flags, load, sampling_given, sampling_params, stream
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.entrypoints.llm import LLM

_HELP = "/reset forgets the conversation, /system TEXT gives instructions, /quit (or Ctrl-D) leaves."


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire chat`."""
    parser.add_argument("--system", metavar="TEXT", help="instructions to begin with")
    add_sampling_flags(parser, {"max_tokens": "most tokens of an answer (default: to the end of the context)"})
    add_engine_flags(parser)
    parser.epilog = f"In the conversation: {_HELP} Ctrl-C stops an answer."


def run(namespace: Namespace) -> None:
    """Talk until the input ends."""
    interactive = sys.stdin.isatty()
    given = sampling_given(namespace)
    llm, startup = load(namespace)
    params = sampling_params(llm, given, max_tokens=None)
    if interactive:
        print(f"Ready in {startup:.1f} s. {_HELP}")
    conversation = Conversation(llm, params, namespace.system)
    for line in _lines(interactive):
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.reset(rest.strip() or None)
        elif command.startswith("/"):
            print(f"There is no command {command}. {_HELP}")
        else:
            try:
                conversation.answer(line)
            except InvalidRequestError as error:
                if not interactive:
                    raise
                print(f"error: {error}", file=sys.stderr)


class Conversation:
    """The messages so far; `answer` adds the user's and the model's."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Start anew, with the instructions given, or else those there were."""
        self._system = system or getattr(self, "_system", None)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}] if self._system else []

    def answer(self, text: str) -> None:
        """Print the model's answer to `text` as it comes; Ctrl-C keeps what has come.

        Raises:
            InvalidRequestError: the conversation no longer fits in the context; `text` is then not part of it.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self._llm.get_tokenizer().apply_chat_template(asked, add_generation_prompt=True, tokenize=True)
        pieces: list[str] = []
        outputs = stream(self._llm, {"prompt_token_ids": prompt}, self._params)
        with closing(outputs), _interrupts() as interrupted:
            for output in outputs:
                pieces.append(output.outputs[0].text)
                print(pieces[-1], end="", flush=True)
                if interrupted():
                    print(" [stopped]", end="")
                    break
        print(flush=True)
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def _lines(interactive: bool) -> Iterator[str]:
    """Non-empty lines of the user, to the end of the input."""
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
            print("\n/quit or Ctrl-D leaves.")
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
