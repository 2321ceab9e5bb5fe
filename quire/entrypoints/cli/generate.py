"""`quire generate`: continues prompts, for a person who wants to look.

A single prompt streams: its text alone goes to stdout, the figures to stderr, so that it can be piped. Several
prompts run as one batch behind a progress bar, and then are listed with a closing line of figures.
"""

import shutil
import sys
import textwrap
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.entrypoints.cli.flags import add_engine_flags
from quire.entrypoints.cli.session import add_sampling_flags, load, sampling_given, sampling_params, stream
from quire.errors import ConfigError
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.entrypoints.llm import LLM

_DEFAULT_MAX_TOKENS = 128


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire generate`."""
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue; repeat for several"
    )
    parser.add_argument("--prompts-file", metavar="FILE", help="a file of prompts, one a line ('-': standard input)")
    add_sampling_flags(
        parser,
        {
            "max_tokens": f"most tokens to generate for each prompt (default: {_DEFAULT_MAX_TOKENS})",
            "n": "texts to generate for each prompt",
        },
    )
    add_engine_flags(parser)
    parser.epilog = "Without --prompt and --prompts-file the prompt is what standard input holds."


def run(namespace: Namespace) -> None:
    """Generate, and print."""
    given = sampling_given(namespace)
    prompts = _read_prompts(namespace)
    llm, startup = load(namespace)
    params = sampling_params(llm, given, max_tokens=_DEFAULT_MAX_TOKENS)
    if len(prompts) == 1 and params.n == 1:
        _stream_one(llm, prompts[0], params, startup)
    else:
        _generate_all(llm, prompts, params, startup)


def _read_prompts(namespace: Namespace) -> list[str]:
    """The prompts that the flags name; all of standard input as one prompt where they name none.

    Raises:
        ConfigError: there is no prompt, or the file can't be read.
    """
    prompts = list(namespace.prompt)
    try:
        if namespace.prompts_file == "-":
            prompts += [line for line in sys.stdin.read().splitlines() if line.strip()]
        elif namespace.prompts_file is not None:
            text = Path(namespace.prompts_file).read_text(encoding="utf-8")
            prompts += [line for line in text.splitlines() if line.strip()]
        elif not prompts and not sys.stdin.isatty():
            prompts = [text] if (text := sys.stdin.read().removesuffix("\n")) else []
    except OSError as error:
        raise ConfigError(f"--prompts-file {namespace.prompts_file}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError("the prompts are not UTF-8 text.") from None
    if not prompts:
        raise ConfigError("no prompt: give --prompt TEXT or --prompts-file FILE, or pipe a prompt in.")
    return prompts


def _stream_one(llm: "LLM", prompt: str, params: SamplingParams, startup: float) -> None:
    start, num_prompt_tokens, num_output_tokens = time.perf_counter(), 0, 0
    for output in stream(llm, prompt, params):
        num_prompt_tokens = len(output.prompt_token_ids or ())
        num_output_tokens += len(output.outputs[0].token_ids)
        print(output.outputs[0].text, end="", flush=True)
    print(flush=True)
    elapsed = time.perf_counter() - start
    print(_figures(startup, elapsed, num_prompt_tokens, num_output_tokens), file=sys.stderr)


def _generate_all(llm: "LLM", prompts: Sequence[str], params: SamplingParams, startup: float) -> None:
    start = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=True)
    elapsed = time.perf_counter() - start
    for number, output in enumerate(outputs, start=1):
        _print_texts(f"[{number}/{len(outputs)}]", output)
    num_prompt_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    print(f"\n{len(prompts)} prompts, {_figures(startup, elapsed, num_prompt_tokens, num_output_tokens)}")


def _print_texts(label: str, output: RequestOutput) -> None:
    """The prompt on a line of its own, and below it, indented, each text that continues it."""
    wrapper = textwrap.TextWrapper(
        width=min(shutil.get_terminal_size().columns, 100),
        initial_indent="    ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}{label} {' '.join((output.prompt or '').split())}{plain}")
    for completion in output.outputs:
        for line in completion.text.strip("\n").splitlines():
            print(wrapper.fill(line.strip()))
        if completion is not output.outputs[-1]:
            print("    --")


def _figures(startup: float, elapsed: float, num_prompt_tokens: int, num_output_tokens: int) -> str:
    """Start-up seconds, token counts, and rates (tokens per second) in one line."""
    return (
        f"{num_prompt_tokens} tokens in and {num_output_tokens} out in {elapsed:.2f} s "
        f"({num_prompt_tokens / elapsed:,.0f} in/s, {num_output_tokens / elapsed:,.0f} out/s); start-up {startup:.1f} s"
    )
