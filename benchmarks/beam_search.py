"""Beam search in the engine, against the same search by separate requests: CPU time, tokens computed, blocks in use.

    python benchmarks/beam_search.py [--model demo] [--widths 4 8] [--prompts 8] [--tokens 64] [--rounds 5]
        [--no-prefix-caching]

The separate way is vLLM's: each step is a request for each beam, of the prompt and its tokens so far, for one token and
its likeliest candidates; the choice is the engine's own, so both find the same. The two take turns.
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

from quire import LLM, BeamSearchParams, SamplingParams
from quire.outputs import RequestOutput
from quire.protocol.requests import SamplingTask
from quire.protocol.step import SequenceResult, StepPlan, TokenLogprobs
from quire.scheduler.beams import Beams

TEXT = "The old house stood at the edge of the wood, and nobody in the village knew why it had been left so long. "
STARTS = ["Once", "In spring", "The ship", "He said", "At night", "They came", "Her mother", "A letter"]


@dataclass
class Cost:
    """What one search of all prompts took."""

    seconds: float  # of CPU time, all threads
    most_blocks: int  # in use at once
    num_computed: int  # tokens
    found: list[list[list[int]]]  # prompt -> outputs


class Meter:
    """Reads what the engine's plans hold and compute."""

    def __init__(self, llm: LLM) -> None:
        core = llm.llm_engine.core
        kv, submit = core.scheduler.kv, core.executor.submit

        def counted(plan: StepPlan) -> None:
            self.most_blocks = max(self.most_blocks, sum(kv.num_blocks) - sum(kv.num_free_blocks))
            self.num_computed += plan.num_tokens
            submit(plan)

        core.executor.submit = counted  # type: ignore[method-assign]
        self.start()

    def start(self) -> None:
        self.most_blocks = self.num_computed = 0
        self.started = time.process_time()

    def cost(self, found: list[list[list[int]]]) -> Cost:
        return Cost(time.process_time() - self.started, self.most_blocks, self.num_computed, found)


def in_the_engine(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[list[list[int]]]:
    """As `LLM.beam_search` does it."""
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = llm.beam_search(given, params)
    return [[s.tokens[len(p) :] for s in output.sequences] for p, output in zip(prompts, found, strict=True)]


def by_requests(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[list[list[int]]]:
    """A request for each beam and token."""
    eos = llm.model_config.eos_token_ids
    task = SamplingTask(
        params=params.sampling_params(),
        max_tokens=params.max_tokens,
        stop_token_ids=frozenset(eos),
        eos_token_id=eos[0],
        seed=0,
    )
    searches = [Beams(task) for _ in prompts]
    live: dict[int, dict[int, list[int]]] = {place: {0: []} for place in range(len(prompts))}
    one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=task.num_candidates, detokenize=False)
    while live:
        asked = [(place, index, tokens) for place, beams in live.items() for index, tokens in beams.items()]
        given: list[Any] = [{"prompt_token_ids": prompts[place] + tokens} for place, _, tokens in asked]
        outputs = llm.generate(given, one, use_tqdm=False)
        for (place, index, tokens), output in zip(asked, outputs, strict=True):
            result = SequenceResult(candidates=candidates_of(output, task.num_candidates))
            branches = searches[place].advance(index, len(tokens), result)
            if branches is not None:
                before = live.pop(place)
                if branches:
                    live[place] = {b.index: [*before[b.parent], b.token_id] for b in branches}
    return [[[entry.token_ids[0] for entry in ending.logprobs] for ending in search.endings()] for search in searches]


def candidates_of(output: RequestOutput, num: int) -> TokenLogprobs:
    """The likeliest tokens, best first."""
    (entry,) = output.outputs[0].logprobs or [{}]
    best = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:num]
    return TokenLogprobs([t for t, _ in best], [x.logprob for _, x in best], [x.rank or 0 for _, x in best])


def measure(llm: LLM, meter: Meter, prompts: list[list[int]], params: BeamSearchParams, num_rounds: int) -> list[Cost]:
    """The best of several rounds of each way, in turn."""
    rounds: list[list[Cost]] = []
    for _ in range(num_rounds + 1):  # the first is for warming up
        costs: list[Cost] = []
        for search in (in_the_engine, by_requests):
            llm.reset_prefix_cache()
            meter.start()
            costs.append(meter.cost(search(llm, prompts, params)))
        rounds.append(costs)
    assert rounds[0][0].found == rounds[0][1].found, "the two ways found different outputs"
    return [min(ways, key=lambda cost: cost.seconds) for ways in zip(*rounds[1:], strict=True)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4, help="of a text of 25 words, in each prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-prefix-caching", action="store_true")
    args = parser.parse_args()
    llm = LLM(
        args.model,
        max_num_seqs=max(args.widths) * args.prompts,
        max_logprobs=-1,
        enable_prefix_caching=not args.no_prefix_caching,
        show_progress=False,
    )
    meter = Meter(llm)
    tokenizer = llm.get_tokenizer()
    texts = [f"{STARTS[i % len(STARTS)]} {i}. " + TEXT * args.repeats for i in range(args.prompts)]
    prompts = [tokenizer.encode(text) for text in texts]
    print(
        f"{args.prompts} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, {args.tokens} tokens"
    )
    print("| width | way | CPU seconds | ms a token of each beam | tokens computed | blocks at most |")
    print("|---|---|---|---|---|---|")
    for width in args.widths:
        params = BeamSearchParams(width, args.tokens, ignore_eos=False, early_stopping="never")
        costs = measure(llm, meter, prompts, params, args.rounds)
        for way, cost in zip(("in the engine", "separate requests"), costs, strict=True):
            each = 1000 * cost.seconds / (width * args.prompts * args.tokens)
            numbers = f"{cost.seconds:.2f} | {each:.3f} | {cost.num_computed} | {cost.most_blocks}"
            print(f"| {width} | {way} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
