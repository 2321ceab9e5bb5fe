"""`quire chat`: a conversation in the terminal, each answer printed as it comes.

`quire chat MODEL` runs the model in this process, `quire chat` asks a server; the conversation is the same. Lines
starting with a slash are commands (`quire.entrypoints.cli.talk`). With piped input it prints the answers only. Ctrl-C
ends the answer under way, Ctrl-D the conversation.
"""

import signal
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from threading import Event
from typing import Any

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli import session
from quire.entrypoints.cli.flags import add_engine_flags, flag_name, options_given
from quire.entrypoints.cli.talk import Answer, Answerer, Messages, Talk, commands_help, is_about_context
from quire.entrypoints.cli.terminal import Keyboard
from quire.errors import ConfigError, InvalidRequestError

_PIPED_HELP = """\
Piped input: each line that is not empty is a question or a command (several lines as above); only answers are printed,
and the first error ends it. All of it as one question: quire chat -q "$(cat FILE)"."""


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire chat`."""
    parser.add_argument("--system", "--system-prompt", dest="system", metavar="TEXT", help="instructions to begin with")
    session.add_server_flags(parser)
    session.add_sampling_flags(parser, {"max_tokens": "most tokens of an answer (default: to the end of the context)"})
    model_help = "model directory, hub id or 'demo', to run it in this process (default: ask a server)"
    add_engine_flags(parser, model_help=model_help)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = f"In the conversation (Ctrl-C stops an answer):\n{commands_help()}\n\n{_PIPED_HELP}"


def run(namespace: Namespace) -> None:
    """Talk until the input ends."""
    interactive = sys.stdin.isatty() and namespace.quick is None
    given = session.sampling_given(namespace)
    in_process = namespace.model_argument is not None or hasattr(namespace, "model")
    answerer, greeting = (_engine if in_process else _server)(namespace, given)
    keyboard = Keyboard(interactive, "/quit or Ctrl-D leaves.", styled=True)
    talk = Talk(answerer, given, keyboard, namespace.system or "")
    if namespace.quick is not None:
        talk.ask(namespace.quick)
        return
    if interactive:
        lacks = "\n(pip install prompt-toolkit rich brings multi-line editing and Markdown.)" if keyboard.lacks else ""
        print(f"{greeting} /help tells of commands, /quit (or Ctrl-D) leaves.{lacks}")
    talk.run()


def _engine(namespace: Namespace, given: dict[str, Any]) -> tuple[Answerer, str]:
    """Answers of an engine in this process, and a greeting."""
    for name in {"url", "model_name", "api_key"} & vars(namespace).keys():
        raise ConfigError(f"{flag_name(name)} is about a server, but a named MODEL runs here: leave one out.")
    llm, startup = session.load(namespace)

    def answer(messages: Messages, noted: Answer) -> Generator[str, None, None]:
        params = session.sampling_params(llm, given, max_tokens=None)
        prompt = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        stream = session.stream(llm, {"prompt_token_ids": prompt}, params)
        with closing(stream) as outputs, _interrupts() as interrupted:
            for output in outputs:
                completion = output.outputs[0]
                noted.note(noted.num_tokens + len(completion.token_ids), completion.finish_reason)
                yield completion.text
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

    def answer(messages: Messages, noted: Answer) -> Generator[str, None, None]:
        body = {"messages": messages, **seed, **given, "stream_options": {"include_usage": True}}
        try:
            yield from told(body, noted)
        except InvalidRequestError as error:
            if not is_about_context(error) or body.pop("max_tokens", None) is None:
                raise
            yield from told(body, noted)  # it is the most of an answer, and here the context has less

    def told(body: dict[str, Any], noted: Answer) -> Generator[str, None, None]:
        with closing(server.events("/chat/completions", body)) as events:
            for event in events:
                choices = event.choices or []
                count = noted.num_tokens + sum(choice.is_token for choice in choices)
                reason = next((choice.finish_reason for choice in choices), None)
                noted.note(event.usage.completion_tokens if event.usage else count, reason)
                yield "".join(choice.piece for choice in choices)

    return answer, f"Talking with {server.model}."


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
