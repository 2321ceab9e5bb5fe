"""`quire bench spec`: measures each way of drafting beside plain decoding, in turn, in this process.

For every configuration, number of drafts and batch it says how much faster a token comes, how many tokens a step
yields, and how many it must yield to be worth its cost. Synthetic drafts, right at a chosen rate, show that cost for
any model. Answers are compared with those of plain decoding as they come.
"""

import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from quire.config.draft_tree import DraftTree
from quire.config.engine_args import EngineArgs
from quire.config.speculative import SpeculativeConfig
from quire.entrypoints.cli.files import OutputFile, read_prompts, write_figures, write_text
from quire.entrypoints.cli.flags import add_counts, add_engine_flags, engine_args_from, json_object, positive_int
from quire.entrypoints.cli.session import random_prompts
from quire.entrypoints.cli.speculation.plot import Figures, render
from quire.errors import ConfigError, QuireError
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.entrypoints.llm import LLM

COPIES = """Edit this text: put "ship" for "boat", and change nothing else.

The captain said that the boat would sail at dawn, and the mate said that it would not. Whoever was on the boat went to
sleep, but for the cook, who sat on the deck and looked at the harbour. In the morning the boat was gone.

The same text, edited:

The captain said that the ship would sail at dawn, and the mate said that it would not. Whoever was on the ship went to
sleep, but for the cook, who sat on the deck"""
FREE = "Once upon a time, in a small town by the sea,"
_SYNTHETIC_INPUT_LEN = 64
_OF_ANY = [{"method": "ngram"}, {"method": "suffix"}]
_OF_THE_DEMO = [
    {"method": "draft_model", "model": "demo-draft"},
    {"method": "medusa", "model": "demo-medusa"},
    {"method": "eagle", "model": "demo-eagle"},
    {"method": "eagle3", "model": "demo-eagle3"},
]


@dataclass(frozen=True)
class Workload:
    """Prompts, and how they are continued."""

    text: str
    prompts: list[Any]
    params: list[SamplingParams]


class _Run:
    """One generation: what it took, and what came out."""

    def __init__(self, llm: "LLM", work: Workload) -> None:
        before = llm.get_metrics().speculation
        cpu, wall = time.process_time(), time.perf_counter()
        outputs = llm.generate(work.prompts, work.params, use_tqdm=False)
        self.seconds, self.cpu = time.perf_counter() - wall, time.process_time() - cpu
        after = llm.get_metrics().speculation
        self.tokens = [list(output.outputs[0].token_ids) for output in outputs]
        self.num_drafted = self.num_accepted = 0
        if before is not None and after is not None:
            self.num_drafted = after.num_draft_tokens - before.num_draft_tokens
            self.num_accepted = after.num_accepted_tokens - before.num_accepted_tokens


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire bench spec`."""
    parser.usage = "%(prog)s [MODEL] [options]"
    what = "a speculative_config to measure; repeat. Default: ngram and suffix, and for the demo what is bundled "
    what += "with it: demo-draft, demo-medusa, demo-eagle, demo-eagle3"
    parser.add_argument("--try", action="append", dest="tried", type=json_object, metavar="JSON", help=what)
    lists: list[tuple[str, str, Any, list[Any], str]] = [
        ("--num-speculative-tokens", "+", positive_int, [1, 3, 5], "most drafts, where no configuration says how many"),
        ("--batch-sizes", "+", positive_int, [1, 8], "sequences at a time"),
        ("--acceptance-rates", "*", _rate, [0.0, 0.5, 0.8], "of synthetic drafts; give none to leave them out"),
    ]
    for flag, count, of_type, default, help_text in lists:
        shown = f"{help_text} (default: {' '.join(map(str, default))})"
        parser.add_argument(flag, nargs=count, type=of_type, default=default, metavar="N", help=shown)
    add_counts(parser, ("--rounds", 3, "timed pairs of runs"), ("--output-len", 128, "tokens of each output"))
    help_text = 'prompts instead of a text to edit and one to make up: text, one a line, or .jsonl of {"prompt": ...}'
    parser.add_argument("--dataset", metavar="FILE", help=help_text)
    parser.add_argument("--plot", type=OutputFile, metavar="FILE", help="draw the speed-ups to this SVG file")
    parser.add_argument("--output-json", type=OutputFile, metavar="FILE", help="write the figures to this file, too")
    add_engine_flags(parser, {"enable_prefix_caching": False})


def run(namespace: Namespace) -> None:
    """Measure, print a table as it grows, and write the files that were asked for."""
    args = engine_args_from(namespace)
    if args.speculative_config is not None:
        raise ConfigError("--speculative-config: name what is to be measured with --try.")
    for config in namespace.tried or []:
        SpeculativeConfig.read(_with_drafts(config, namespace.num_speculative_tokens[0]))
    found: list[Figures] = []
    print(f"{'drafts':42} {'text':9} {'k':>2} {'batch':>5} {'us/token':>9} {'speed-up':>8} {'CPU':>5} ", end="")
    print(f"{'tokens/step':>11} {'break-even':>10} {'accepted':>14}")
    for figures in _measure(namespace, args):
        found.append(figures)
        row = f"{figures.name:42} {figures.text:9} {figures.num_speculative_tokens:2} {figures.batch_size:5} "
        row += f"{figures.seconds_per_token * 1e6:9,.0f} {figures.speedup:8.2f} {figures.cpu_speedup:5.2f} "
        row += f"{figures.tokens_per_step:11.2f} {figures.break_even:10.2f} "
        print(row + f"{figures.num_accepted:>6} of {figures.num_drafted}", flush=True)
    write_figures(namespace.output_json, {"model": args.model, "figures": [asdict(figures) for figures in found]})
    if namespace.plot is not None:
        write_text(namespace.plot, "--plot", render(found, args.model))


def _rate(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _measure(namespace: Namespace, args: EngineArgs) -> Iterator[Figures]:
    plain = _engine(args, None)
    tried = namespace.tried or [*_OF_ANY, *(_OF_THE_DEMO if args.model == "demo" else [])]
    counts = sorted(set(namespace.num_speculative_tokens))
    for batch in namespace.batch_sizes:
        prompts = random_prompts(plain, batch, _SYNTHETIC_INPUT_LEN)
        synthetic = Workload("random", prompts, _params(batch, namespace.output_len, 0.0))
        works = list(_workloads(namespace, batch))
        for num_drafts in counts:
            if namespace.acceptance_rates:
                yield from _measure_synthetic(namespace, args, plain, synthetic, num_drafts)
            for config in tried:
                if num_drafts > counts[0] and _says_how_many(config):
                    continue
                name, whole = _name(config), _with_drafts(config, num_drafts)
                try:
                    llm = _engine(args, whole)
                except QuireError as error:
                    if num_drafts == counts[0]:
                        raise
                    # What drafts so few: heads are as many as there are.
                    print(f"{name}: nothing with {num_drafts} drafts: {error}", file=sys.stderr)
                    continue
                for work in works:
                    yield _compare(plain, llm, work, (name, whole), namespace.rounds)
                llm.llm_engine.shutdown()


def _says_how_many(config: Mapping[str, Any]) -> bool:
    """Whether it is one number of drafts that a configuration is measured with: its own, or its tree's nodes."""
    return "num_speculative_tokens" in config or "speculative_token_tree" in config


def _with_drafts(config: dict[str, Any], num_drafts: int) -> dict[str, Any]:
    return config if _says_how_many(config) else {"num_speculative_tokens": num_drafts} | config


def _name(config: Mapping[str, Any]) -> str:
    """How a configuration is called in table and picture: by its values."""
    tree = config.get("speculative_token_tree")
    said = {key: value for key, value in config.items() if key != "num_speculative_tokens"}
    if tree is not None:
        said["speculative_token_tree"] = f"tree of {len(DraftTree.read(tree))}"
    plain = bool | int | float  # by themselves they say nothing
    return ", ".join(f"{key} {value}" if isinstance(value, plain) else str(value) for key, value in said.items())


def _measure_synthetic(
    namespace: Namespace, args: EngineArgs, plain: "LLM", work: Workload, num_drafts: int
) -> Iterator[Figures]:
    from quire.entrypoints.cli.speculation.replay import ReplayProposer
    from quire.executor.inprocess import InProcessExecutor

    config = {"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False}
    llm = _engine(args, config)
    executor = llm.llm_engine.executor
    if not isinstance(executor, InProcessExecutor):
        raise ConfigError("--acceptance-rates needs the in-process executor; give no rates with another.")
    prompts, vocab_size = [tuple(prompt["prompt_token_ids"]) for prompt in work.prompts], llm.model_config.vocab_size
    known = dict(zip(prompts, _Run(plain, work).tokens, strict=True))
    for rate in namespace.acceptance_rates:
        executor.worker.runner.speculation.proposer = ReplayProposer(num_drafts, rate, vocab_size, known)  # type: ignore[union-attr]
        yield _compare(plain, llm, work, (f"synthetic, {rate:g} accepted", config), namespace.rounds)
    llm.llm_engine.shutdown()


def _engine(args: EngineArgs, config: dict[str, Any] | None) -> "LLM":
    from quire.entrypoints.llm import LLM

    return LLM(**vars(args) | {"speculative_config": config, "show_progress": False})


def _compare(plain: "LLM", llm: "LLM", work: Workload, drafting: tuple[str, dict[str, Any]], rounds: int) -> Figures:
    """Run both in turn, after a run of each that is not timed; `drafting`: its name and configuration."""
    name, config = drafting
    expected, first = _Run(plain, work), _Run(llm, work)
    if config.get("acceptance", "exact") == "exact" and first.tokens != expected.tokens:
        raise QuireError(f"{name}: drafts changed an answer, which is a fault of Quire's: please report it.")
    pairs = [(_Run(plain, work), _Run(llm, work)) for _ in range(rounds)]
    num_tokens = sum(map(len, first.tokens)) * rounds
    num_accepted = sum(own.num_accepted for _, own in pairs)
    speedup = statistics.median(other.seconds / own.seconds for other, own in pairs)
    tokens_per_step = num_tokens / (num_tokens - num_accepted)
    longest = max(map(len, first.tokens))
    return Figures(
        name=name,
        text=work.text,
        num_speculative_tokens=SpeculativeConfig.read(config).max_drafts,
        batch_size=len(work.prompts),
        seconds_per_token=statistics.median(own.seconds for _, own in pairs) / longest,
        plain_seconds_per_token=statistics.median(other.seconds for other, _ in pairs) / longest,
        speedup=speedup,
        cpu_speedup=statistics.median(other.cpu / own.cpu for other, own in pairs),
        num_drafted=sum(own.num_drafted for _, own in pairs),
        num_accepted=num_accepted,
        tokens_per_step=tokens_per_step,
        break_even=tokens_per_step / speedup,
    )


def _workloads(namespace: Namespace, batch: int) -> Iterator[Workload]:
    """The texts; what copies is greedy, what is made up is drawn, as small models repeat themselves else."""
    length = namespace.output_len
    if namespace.dataset:
        prompts = [prompt for prompt, _ in read_prompts(namespace.dataset, "--dataset", batch, length)]
        yield Workload("dataset", [prompts[i % len(prompts)] for i in range(batch)], _params(batch, length, 0.0))
        return
    yield Workload("copies", [COPIES] * batch, _params(batch, length, 0.0))
    yield Workload("free", [FREE] * batch, _params(batch, length, 1.0))


def _params(batch: int, length: int, temperature: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=i, max_tokens=length, ignore_eos=True) for i in range(batch)]
