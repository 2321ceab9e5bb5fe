"""A picture of a pipeline: when each stage computes which plan, as an SVG, from a real run.

    python benchmarks/timeline.py [MODEL] [--out docs/timeline.svg] [--plans 12] [--skip 20] [KEY=VALUE ...]

Starts MODEL (the demo) with two stages, and decodes a batch while further prompts come in chunks. The workers are this
file, too: each notes when its layers begin and end, and the last one when it has drawn. The clock is the machine's.
"""

import argparse
import json
import os
import random
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quire import LLM, SamplingParams
from quire.executor import processes

_FOLDER = "QUIRE_TIMELINE"  # names the folder, for the workers
_WIDTH, _LEFT, _ROW, _TOP = 960, 70, 64, 46  # pixels
_COLORS = ("#3b6fb6", "#d9822b", "#4b9b5f")


class Span(NamedTuple):
    """Something that a stage did."""

    plan: int
    num_tokens: int
    what: str  # "layers" or "draw"
    start: float  # seconds
    end: float


# In a worker.


def record(folder: Path) -> None:
    """Have this process's runner note what it does, and write that down when it ends."""
    from quire.worker.runner import ModelRunner
    from quire.worker.worker import Worker

    spans: list[Span] = []
    begin, finish, close = ModelRunner.begin, ModelRunner.finish, Worker.close
    plan: Any = None

    class Timed:
        def __init__(self, model: Any) -> None:
            self._model = model

        def __getattr__(self, name: str) -> Any:
            return getattr(self._model, name)

        def __call__(self, *given: Any) -> Any:
            start = time.monotonic()
            hidden = self._model(*given)
            spans.append(Span(plan.step_id, plan.num_tokens, "layers", start, time.monotonic()))
            return hidden

    def timed_begin(runner: Any, given: Any) -> None:
        nonlocal plan
        if not isinstance(runner.model, Timed):
            runner.model = Timed(runner.model)
        plan = given
        begin(runner, given)

    def timed_finish(runner: Any, guide: Any = None) -> Any:
        start = time.monotonic()
        result = finish(runner, guide)
        spans.append(Span(result.step_id, 0, "draw", start, time.monotonic()))
        return result

    def closed(worker: Any) -> None:
        (folder / sys.argv[3]).write_text(json.dumps(spans))
        close(worker)

    runner_class: Any = ModelRunner
    worker_class: Any = Worker
    runner_class.begin, runner_class.finish, worker_class.close = timed_begin, timed_finish, closed


# In the engine's process.


def run(model: str, options: dict[str, Any]) -> list[list[Span]]:
    """What each stage did in a run."""
    start = processes.start_child

    def started(_: str, *arguments: str, **given: Any) -> Any:
        return start("timeline", *arguments, **given)

    processes.start_child = started
    with tempfile.TemporaryDirectory() as folder:
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ |= {_FOLDER: folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}
        llm = LLM(model, pipeline_parallel_size=2, enable_prefix_caching=False, max_num_batched_tokens=64, **options)
        rng = random.Random(0)
        prompts = [{"prompt_token_ids": [rng.randrange(3, 4000) for _ in range(48)]} for _ in range(16)]
        params = [SamplingParams(temperature=0, max_tokens=24 + 4 * i, ignore_eos=True) for i in range(len(prompts))]
        llm.generate(prompts, params, use_tqdm=False)
        llm.llm_engine.shutdown()
        return [[Span(*each) for each in json.loads((Path(folder) / str(rank)).read_text())] for rank in range(2)]


def both(stages: list[list[Span]]) -> float:
    """Seconds in which both stages computed layers."""
    layers = [[span for span in spans if span.what == "layers"] for spans in stages]
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in layers[0] for b in layers[1])


def drawn(stages: list[list[Span]], model: str) -> str:
    """The SVG."""
    low = min(span.start for spans in stages for span in spans)
    seconds = max(span.end for spans in stages for span in spans) - low
    height = _TOP + _ROW * len(stages) + 40
    place: Callable[[float], float] = lambda at: _LEFT + (at - low) / seconds * (_WIDTH - _LEFT - 12)  # noqa: E731
    share = both(stages) / seconds
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24">{model}, -pp 2: each box is a plan in a stage, with its number; pale: the last stage '
        f"draws. Both compute in {share:.0%} of this time.</text>",
    ]
    for stage, spans in enumerate(stages):
        y = _TOP + _ROW * stage
        lines.append(f'<text x="12" y="{y + 28}">stage {stage}</text>')
        for span in spans:
            x, width = place(span.start), max(1.0, place(span.end) - place(span.start))
            color, pale = _COLORS[span.plan % len(_COLORS)], ' fill-opacity="0.35"' if span.what == "draw" else ""
            told = f"plan {span.plan}: {span.what}, {(span.end - span.start) * 1e6:.0f} us"
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="44" fill="{color}"{pale}>'
                f"<title>{told}</title></rect>"
            )
            if span.what == "layers" and width > 20:
                lines.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 27}" fill="white" text-anchor="middle">{span.plan}</text>'
                )
    y = _TOP + _ROW * len(stages)
    step = next(each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000) if seconds * 1e3 / each <= 12)
    for i in range(int(seconds * 1e3 / step) + 1):
        x = place(low + i * step / 1e3)
        lines.append(f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{y - 10}" stroke="#ccc"/>')
        lines.append(f'<text x="{x:.1f}" y="{y + 10}" text-anchor="middle" fill="#555">{i * step:g} ms</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Run, and draw some plans out of the middle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--out", type=Path, default=Path("docs/timeline.svg"))
    parser.add_argument("--plans", type=int, default=12)
    parser.add_argument("--skip", type=int, default=20)
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_intermixed_args()
    options = {key: json.loads(value) for key, value in (option.split("=", 1) for option in given.options)}
    stages = run(given.model, options)
    first = stages[0][0].plan + given.skip
    shown = [[span for span in spans if first <= span.plan < first + given.plans] for spans in stages]
    given.out.write_text(drawn(shown, Path(given.model).name))
    whole = max(span.end for span in stages[1]) - min(span.start for span in stages[0])
    print(f"{len(stages[0])} plans in {whole * 1e3:.0f} ms; both stages compute in {both(stages) / whole:.0%} of that")


if __name__ == "__main__":
    if _FOLDER in os.environ:  # a worker
        record(Path(os.environ[_FOLDER]))
        runpy.run_module("quire.entrypoints.worker", run_name="__main__")
    else:
        main()
