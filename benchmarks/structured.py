"""What structured output costs: tokens a second with and without a schema, masks, compiling, and streams meanwhile.

Run: python benchmarks/structured.py [MODEL] [--repeat N] [--tokens N] [--only PART ...]. Prints all that it measures, a
line each.
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
BOMB = {"allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(40)]}  # refused when it has taken its time
PARTS = ("stalls", "throughput", "masks", "compiling")


def large_schema(num: int) -> dict[str, Any]:
    fields = {f"field_{i}": {"type": "string", "maxLength": 40} for i in range(num)}
    inner = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "items": inner}


def rate(llm: LLM, batch: int, structure: dict[str, Any] | None, num_tokens: int) -> float:
    """Tokens a second of so many requests at once, of so many tokens each."""
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=num_tokens, ignore_eos=True, structured_outputs=structure
    )
    start = time.perf_counter()
    outputs = llm.generate(["Once upon a time"] * batch, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def throughput(llm: LLM, repeat: int, num_tokens: int) -> None:
    """Medians of rounds; a ratio is the median of the rounds' own, whose runs follow one another."""
    for batch in (1, 32):
        kinds: dict[str, dict[str, Any] | None] = {"none": None, "schema": {"json": PROSE}, "free regex": FREE}
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(repeat + 1):  # the first round compiles
            for name, structure in kinds.items():
                rates[name].append(rate(llm, batch, structure, num_tokens))
        for name, found in rates.items():
            ratio = statistics.median(one / none for one, none in zip(found[1:], rates["none"][1:], strict=True))
            median = statistics.median(found[1:])
            print(f"batch {batch:2}  {name:10}  {median:9.0f} tokens/s  {ratio:6.3f} of none", flush=True)


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
    """Time to compile schemas, once vocabulary is read and the process that tries those of doubt is there."""
    manager = _grammars(engine.config)
    assert manager is not None
    start = time.perf_counter()
    manager.compile(b"first", StructuredOutputsParams(regex="a"))
    manager.take(60.0)
    print(f"the vocabulary, and a first grammar: {time.perf_counter() - start:7.2f} s")
    schemas = {f"{num:4} fields": large_schema(num) for num in (3, 10, 100, 1000, 3000)}
    schemas["a pattern"] = {"type": "string", "pattern": "^[a-z]{3}-[0-9]{4}$"}
    schemas["a bomb"] = BOMB
    for name, schema in schemas.items():
        params = StructuredOutputsParams(json=schema)
        start = time.perf_counter()
        manager.compile(name.encode(), params)
        ((_, found),) = manager.take(120.0)
        kind = "compiled" if isinstance(found, Grammar) else "refused"
        milliseconds = (time.perf_counter() - start) * 1e3
        print(f"schema of {name:11} {len(params.constraint):7} bytes: {kind} in {milliseconds:8.1f} ms", flush=True)


def stalls(engine: LLMEngine) -> None:
    """The longest pause between two tokens of a stream: alone, as the first grammar comes, and while 100 compile."""
    pauses(engine, "nothing compiling", [])
    pauses(engine, "the first grammar", [PROSE])
    pauses(engine, "nothing compiling", [])
    large = [large_schema(300) | {"title": str(i)} for i in range(100)]
    pauses(engine, "100 large schemas", large)
    bombs = [BOMB | {"title": str(i)} for i in range(3)]
    pauses(engine, "3 bombs, then 97 large", bombs + [schema | {"description": "b"} for schema in large[3:]])


def pauses(engine: LLMEngine, name: str, schemas: list[dict[str, Any]]) -> None:
    """Of a stream that goes on until all but bombs are compiled, and for 300 tokens at least."""
    most = engine.config.model.max_model_len - 16
    waiting, num_streams, gaps = set[str](), 0, list[float]()
    while not num_streams or (waiting and num_streams < 200):
        num_streams += 1
        engine.add_request(
            f"stream {num_streams}", "Once upon a time", SamplingParams(max_tokens=most, ignore_eos=True, temperature=0)
        )
        last, alive = 0.0, True
        while alive:
            for output in engine.step():
                if output.request_id.startswith("stream"):
                    now = time.perf_counter()
                    gaps += [now - last] if last else []
                    last, alive = now, not output.finished
                elif output.finished:
                    waiting.discard(output.request_id)
            if last and schemas:
                for i, schema in enumerate(schemas):
                    request_id = f"{name} {i}"
                    engine.add_request(
                        request_id, "x", SamplingParams(max_tokens=1, structured_outputs={"json": schema})
                    )
                    if "allOf" not in schema:
                        waiting.add(request_id)
                schemas = []
    while engine.has_unfinished_requests():
        engine.step()
    gaps.sort()
    print(
        f"{name:22}: {len(gaps):5} pauses between tokens, p50 {gaps[len(gaps) // 2] * 1e3:6.2f} ms, "
        f"p99 {gaps[len(gaps) * 99 // 100] * 1e3:6.2f} ms, longest {gaps[-1] * 1e3:7.2f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of each output whose rate is measured")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=512)
    if "stalls" in args.only:
        stalls(llm.llm_engine)
    if "throughput" in args.only:
        throughput(llm, args.repeat, args.tokens)
    if "masks" in args.only:
        masks(llm.llm_engine)
    if "compiling" in args.only:
        compiling(llm.llm_engine)


if __name__ == "__main__":
    main()
