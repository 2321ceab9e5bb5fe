"""`quire generate`: continues prompts, for a person who wants to look.

A single prompt streams: its text alone goes to stdout, the figures to stderr, so that it can be piped. Several
prompts run as one batch behind a progress bar, and then are listed with a closing line of figures.
"""

import sys
import textwrap
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from quire.entrypoints.cli import session
from quire.entrypoints.cli.files import read_text
from quire.entrypoints.cli.flags import add_engine_flags
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.entrypoints.llm import LLM


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire generate`."""
    help_text = "text to continue; repeat for several"
    parser.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help=help_text)
    parser.add_argument("--prompts-file", metavar="FILE", help="a file of prompts, one a line ('-': standard input)")
    session.add_sampling_flags(parser, {"n": "texts to generate for each prompt"})
    add_engine_flags(parser)
    parser.epilog = "Without --prompt and --prompts-file the prompt is what standard input holds."


def run(namespace: Namespace) -> None:
    """Generate, and print."""
    given = session.sampling_given(namespace)
    prompts = _read_prompts(namespace)
    llm, startup = session.load(namespace)
    params = session.sampling_params(llm, given, max_tokens=session.DEFAULT_MAX_TOKENS)
    streamed = len(prompts) == 1 and params.n == 1
    start = time.perf_counter()
    num_input, num_output = _stream_one(llm, prompts[0], params) if streamed else _print_all(llm, prompts, params)
    elapsed = time.perf_counter() - start
    figures = (
        f"{num_input} tokens in and {num_output} out in {elapsed:.2f} s "
        f"({num_input / elapsed:,.0f} in/s, {num_output / elapsed:,.0f} out/s); start-up {startup:.1f} s"
    )
    if streamed:
        print(figures, file=sys.stderr)
    else:
        print(f"\n{len(prompts)} prompts, {figures}")


def _read_prompts(namespace: Namespace) -> list[str]:
    """The prompts that the flags name; all of standard input as one prompt where they name none."""
    prompts = list(namespace.prompt)
    if namespace.prompts_file is not None:
        prompts += filter(str.strip, read_text(namespace.prompts_file, "--prompts-file").split("\n"))
    elif not prompts and not sys.stdin.isatty():
        prompts = [text] if (text := read_text("-").removesuffix("\n")) else []
    if not prompts:
        raise ConfigError("no prompt: give --prompt TEXT or --prompts-file FILE, or pipe a prompt in.")
    return prompts


def _stream_one(llm: "LLM", prompt: str, params: SamplingParams) -> tuple[int, int]:
    """Print a text as it comes; the numbers of tokens in and out."""
    num_input = num_output = 0
    for output in session.stream(llm, prompt, params):
        num_input = len(output.prompt_token_ids or ())
        num_output += len(output.outputs[0].token_ids)
        print(output.outputs[0].text, end="", flush=True)
    print(flush=True)
    return num_input, num_output


def _print_all(llm: "LLM", prompts: list[str], params: SamplingParams) -> tuple[int, int]:
    """Print each prompt with the texts that continue it indented below; the numbers of tokens in and out."""
    outputs = llm.generate(prompts, params, use_tqdm=True)
    for number, output in enumerate(outputs, start=1):
        print(f"\n[{number}/{len(outputs)}] {' '.join((output.prompt or '').split())}")
        texts = (textwrap.indent(completion.text.strip("\n"), "    ") for completion in output.outputs)
        print("\n    --\n".join(texts))
    num_input = sum(len(output.prompt_token_ids or ()) for output in outputs)
    return num_input, sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
