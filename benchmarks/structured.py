"""What structured output costs: tokens a second with and without a schema, masks, compiling, and streams meanwhile.

Run: python benchmarks/structured.py [MODEL] [--repeat N]. Prints a table; times are medians of runs in turn.
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.build import _grammars
from quire.engine.llm_engine import LLMEngine
from quire.structured.matcher import Grammar, MaskBuffer

PROSE = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "pages": {"type": "integer"}, "text": {"type": "string"}},
    "required": ["title", "pages", "text"],
    "additionalProperties": False,
}
# As free as can be: it forces nothing, so that masks are all cost.
FREE = {"regex": r"(?s:.)*"}
NUM_TOKENS = 128


def large_schema(num: int) -> dict[str, Any]:
    fields = {f"field_{i}": {"type": "string", "maxLength": 40} for i in range(num)}
    inner = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "items": inner}


def rate(llm: LLM, batch: int, structure: dict[str, Any] | None) -> float:
    """Tokens a second of so many requests at once."""
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True, structured_outputs=structure
    )
    start = time.perf_counter()
    outputs = llm.generate(["Once upon a time"] * batch, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def throughput(llm: LLM, repeat: int) -> None:
    for batch in (1, 32):
        kinds: dict[str, dict[str, Any] | None] = {"none": None, "schema": {"json": PROSE}, "free regex": FREE}
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(repeat + 1):  # the first round compiles
            for name, structure in kinds.items():
                rates[name].append(rate(llm, batch, structure))
        medians = {name: statistics.median(found[1:]) for name, found in rates.items()}
        for name, median in medians.items():
            print(f"batch {batch:2}  {name:10}  {median:9.0f} tokens/s  {median / medians['none']:5.2f} of none")


def masks(engine: LLMEngine) -> None:
    """Time of a mask, and of taking a token, over an output of the schema."""
    manager = _grammars(engine.config)
    assert manager is not None
    params = StructuredOutputsParams(json=PROSE)
    manager.compile(b"", params)
    ((_, grammar),) = manager.take(60.0)
    assert isinstance(grammar, Grammar), grammar
    assert engine.tokenizer is not None
    text = json.dumps({"title": "A tale of ships and rain", "pages": 312, "text": "Once upon a time. " * 20})
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    mask = MaskBuffer(manager.num_words, 1)
    times: dict[str, list[float]] = {"mask": [], "take": [], "forced": []}
    for _ in range(20):
        matcher = grammar.matcher([], goes_on=False)
        for token_id in ids:
            for name, call in (
                ("mask", lambda: matcher.fill(mask, [])),  # noqa: B023
                ("take", lambda: matcher.take([token_id])),  # noqa: B023
                ("forced", matcher.forced),
            ):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    for name, found in times.items():
        p50, p99 = np.percentile(found, [50, 99]) * 1e6
        print(f"{name:7} p50 {p50:7.1f} us  p99 {p99:7.1f} us")


def compiling(engine: LLMEngine) -> None:
    manager = _grammars(engine.config)
    assert manager is not None
    manager.compile(b"first", StructuredOutputsParams(choice=["a"]))
    manager.take(60.0)
    for num in (10, 100, 1000, 3000):
        params = StructuredOutputsParams(json=large_schema(num))
        start = time.perf_counter()
        manager.compile(str(num).encode(), params)
        ((_, found),) = manager.take(120.0)
        kind = "compiled" if isinstance(found, Grammar) else found
        print(f"schema of {len(params.constraint):7} bytes: {kind} in {(time.perf_counter() - start) * 1e3:7.1f} ms")


def stalls(engine: LLMEngine) -> None:
    """The longest pause between two tokens of a stream, alone and while 100 large grammars compile."""
    for num in (0, 100):
        engine.add_request("stream", "Once upon a time", SamplingParams(max_tokens=300, ignore_eos=True, temperature=0))
        for i in range(num):
            schema = large_schema(300) | {"title": f"{num}-{i}"}
            params = SamplingParams(max_tokens=1, structured_outputs={"json": schema})
            engine.add_request(f"{num}-{i}", "Once", params)
        gaps, last, alive = [], time.perf_counter(), True
        while alive:
            for output in engine.step():
                if output.request_id == "stream":
                    now = time.perf_counter()
                    gaps.append(now - last)
                    last, alive = now, not output.finished
        engine.abort_request([f"{num}-{i}" for i in range(num)])
        while engine.has_unfinished_requests():
            engine.step()
        gaps = sorted(gaps[1:])
        print(
            f"{num:3} compiling: pause between tokens p50 {gaps[len(gaps) // 2] * 1e3:5.2f} ms, "
            f"p99 {gaps[len(gaps) * 99 // 100] * 1e3:5.2f} ms, longest {gaps[-1] * 1e3:5.2f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=512)
    throughput(llm, args.repeat)
    masks(llm.llm_engine)
    compiling(llm.llm_engine)
    stalls(llm.llm_engine)


if __name__ == "__main__":
    main()
