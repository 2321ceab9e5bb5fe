"""Structured output in whole engines: every finished output is of its form, with the same bits however it is run."""

import asyncio
import itertools
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from test_exactness import LateExecutor

from quire import LLM, AsyncLLM, AsyncOptions, EngineArgs, SamplingParams
from quire.engine.build import build_core, worker_config
from quire.engine.llm_engine import LLMEngine
from quire.errors import InvalidRequestError
from quire.executor.inprocess import InProcessExecutor
from quire.protocol.step import StepPlan
from quire.scheduler.outcomes import MANY_GUIDED
from quire.structured_outputs import StructuredOutputsParams
from quire.text.configured import config_tokenizer
from quire.utils.hub import resolve_model_path

PROMPTS = ["Once upon a time", "The captain said", "It was", "She had never seen such a thing, and"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
        "kind": {"enum": ["cat", "dog", None, 5]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer", "maximum": 9, "minimum": 0},
     "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"],
     "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip
STRUCTURES: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": LIST, "disable_any_whitespace": True},
    {"json": TREE},
    {"regex": r"[a-f]{2,6}-\d{3}"},
    {"choice": ["north", "north-east", "south", "\u4e2d\u6587"]},
    {"grammar": 'root ::= "(" item ("," item)* ")"\nitem ::= [a-z] [a-z]?'},
    {"grammar": 'start: "sum(" NUM ("," NUM){1,3} ")"\nNUM: /[0-9]{1,2}/'},
    {"json": {"const": {"a": [1, "two", None], "long text that a model need not think about": True}}},
]


def is_formed(structure: dict[str, Any], text: str) -> bool:
    """Whether a finished output is what was asked for."""
    if "json" in structure:
        jsonschema.validate(json.loads(text), structure["json"], jsonschema.Draft202012Validator)
        return not structure.get("disable_any_whitespace") or not re.search(r"\s", text)
    if "regex" in structure:
        return re.fullmatch(structure["regex"], text) is not None
    if "choice" in structure:
        return text in structure["choice"]
    if structure["grammar"].startswith("root"):
        return re.fullmatch(r"\([a-z]{1,2}(,[a-z]{1,2})*\)", text) is not None
    return re.fullmatch(r"sum\(\d\d?(,\d\d?){1,3}\)", text) is not None


def engine(late: bool = False, **options: Any) -> LLMEngine:
    args = {"model": "demo", "max_model_len": 256, "max_num_seqs": 32, "num_kv_blocks": 1024, "debug": True} | options
    config = EngineArgs(**args).resolve()
    executor = (LateExecutor if late else InProcessExecutor)(worker_config(config))
    core = build_core(config, show_progress=False, executor=executor)
    config = config.with_max_model_len(core.scheduler.config.max_model_len)
    return LLMEngine(config, core, config_tokenizer(config))


def run(one: LLMEngine, params: list[SamplingParams], together: int = 64) -> list[Any]:
    """What each request brings: index, tokens, text, logprobs, finish reason of each output."""
    found: dict[str, Any] = {}
    for low in range(0, len(params), together):
        for i, param in list(enumerate(params))[low : low + together]:
            one.add_request(str(i), PROMPTS[i % len(PROMPTS)], param)
        while one.has_unfinished_requests():
            for output in one.step():
                if output.finished:
                    found[output.request_id] = [
                        (c.index, list(c.token_ids), c.text, c.logprobs, c.finish_reason, c.stop_reason)
                        for c in output.outputs
                    ]
    one.check_integrity()
    assert one.stats().kv_cache_usage_perc == 0
    return [found[str(i)] for i in range(len(params))]


def mixed() -> list[SamplingParams]:
    """Every structure, drawn in every way, and requests without any between them."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 2.0, "seed": 1, "logprobs": 0},
        {"temperature": 1.0, "seed": 2, "n": 4},
        {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "min_tokens": 6, "max_tokens": 9, "top_p": 0.9},
        {"temperature": 1.0, "seed": 4, "ignore_eos": True, "max_tokens": 40, "logit_bias": {40: 3.0}},
        {"temperature": 0, "use_beam_search": True, "n": 2, "best_of": 3, "max_tokens": 20},
    ]
    params = [
        SamplingParams(**({"max_tokens": 64, "structured_outputs": structure} | kind))
        for structure in STRUCTURES
        for kind in kinds
    ]
    for place in range(0, len(params), 7):
        params.insert(place, SamplingParams(temperature=0.9, seed=place, max_tokens=12, logprobs=1))
    return params


def check(params: list[SamplingParams], found: list[Any]) -> None:
    num_finished = 0
    for param, outputs in zip(params, found, strict=True):
        if param.structured_outputs is None:
            continue
        structure = next(s for s in STRUCTURES if StructuredOutputsParams(**s) == param.structured_outputs)
        for _, _, text, _, reason, _ in outputs:
            assert reason in ("stop", "length")
            if reason == "stop":
                num_finished += 1
                assert is_formed(structure, text), (structure, text)
    assert num_finished > len(found) / 2


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """All requests, one after another."""
    return run(engine(enable_prefix_caching=False), mixed(), together=1)


@pytest.mark.slow
def test_outputs_are_of_their_form(alone: list[Any]) -> None:
    check(mixed(), alone)


WAYS: list[tuple[bool, dict[str, Any]]] = [
    (False, {}),
    (True, {"max_num_batched_tokens": 40}),
    (False, {"num_kv_blocks": 12, "block_size": 8, "max_model_len": 90, "max_num_batched_tokens": 32}),
    (True, {"num_kv_blocks": 12, "block_size": 8, "max_model_len": 90, "swap_space": 0.01}),
    (False, {"speculative_config": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}}),
    (
        False,
        {
            "speculative_config": {
                "method": "medusa",
                "model": "demo-medusa",
                "num_speculative_tokens": 3,
                "speculative_token_tree": "[(0,), (1,), (0, 0)]",
            }
        },
    ),
    (False, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("late", "options"), WAYS)
def test_however_they_run(alone: list[Any], late: bool, options: dict[str, Any]) -> None:
    one = engine(late, **options)
    assert run(one, mixed()) == alone
    assert (one.stats().num_preemptions_total > 0) == ("block_size" in options)
    if "speculative_config" not in options:
        assert run(one, mixed()) == alone, "with what the prefix cache has, and the grammars that are kept"


def test_no_tree_is_drafted_under_a_grammar() -> None:
    """Its masks are of chains. Who is free beside it is drafted for, and both have what they have without drafts."""
    shape = {
        "method": "eagle",
        "model": "demo-eagle",
        "adaptive": False,
        "speculative_token_tree": "[(0,), (1,), (0, 0)]",
    }
    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=24, structured_outputs=StructuredOutputsParams(json=PERSON)),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    ]
    plain, llm = LLM("demo"), LLM("demo", speculative_config=shape, debug=True)
    for num_drafted, part in ((0, params[:1]), (1, params)):
        found = [one.generate(PROMPTS[: len(part)], part, use_tqdm=False) for one in (plain, llm)]
        known, drafted = ([output.outputs[0].token_ids for output in outputs] for outputs in found)
        assert drafted == known
        stats = llm.get_metrics().speculation
        assert stats is not None
        assert (stats.num_drafts > 0) == (num_drafted > 0)


@pytest.mark.slow
def test_nothing_is_lost(alone: list[Any]) -> None:
    """Plans are cancelled and the workers forget all."""
    params = mixed()
    one = engine(late=True)
    for i, param in enumerate(params):
        one.add_request(str(i), PROMPTS[i % len(PROMPTS)], param)
    found: dict[str, Any] = {}
    scheduler = one.core.scheduler
    for step in range(10_000):
        if not one.has_unfinished_requests():
            break
        if step in (3, 17, 25, 40):
            one.core._plans.clear()
            scheduler.cancel()
            one.executor.reset()
        for output in one.step():
            if output.finished:
                found[output.request_id] = [(c.index, list(c.token_ids), c.text) for c in output.outputs]
    assert [found[str(i)] for i in range(len(params))] == [[part[:3] for part in parts] for parts in alone]


@pytest.mark.parametrize(
    "speculative",
    [
        None,
        pytest.param({"method": "medusa", "model": "demo-medusa", "adaptive": False}, marks=pytest.mark.slow),
        pytest.param({"method": "eagle3", "model": "demo-eagle3", "adaptive": False}, marks=pytest.mark.slow),
        pytest.param({"method": "draft_model", "model": "demo-draft", "adaptive": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_forced_tokens_are_drafts(monkeypatch: pytest.MonkeyPatch, speculative: dict[str, Any] | None) -> None:
    """What a grammar leaves no choice of takes fewer steps, and changes nothing."""
    steps: list[int] = []
    found: list[Any] = []
    kind: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 60, "logprobs": 1}
    params = [SamplingParams(structured_outputs=structure, **kind) for structure in STRUCTURES]
    for most in (8, 0):
        monkeypatch.setattr("quire.structured.matcher.MAX_FORCED", most)
        one = engine(speculative_config=speculative)
        count = 0
        schedule = one.core.scheduler.schedule

        def counted(now: float) -> StepPlan | None:
            nonlocal count
            plan = schedule(now)  # noqa: B023
            count += plan is not None
            return plan

        monkeypatch.setattr(one.core.scheduler, "schedule", counted)
        found.append(run(one, params, together=1))
        steps.append(count)
        assert speculative or one.stats().speculation is None, "they are no speculation"
    assert found[0] == found[1]
    assert steps[0] < steps[1] * 0.9


@pytest.mark.slow
def test_forced_tokens_are_drafts_of_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What many requests' grammars force is found with the masks, while the model computes: a token later, and used."""
    text = StructuredOutputsParams(regex="[ab ]{8}: a text of which no word is left to the model, whatever it may say")
    params = [SamplingParams(structured_outputs=text, max_tokens=60, seed=i) for i in range(2 * MANY_GUIDED)]
    found: list[Any] = []
    steps: list[int] = []
    for most in (8, 0):
        monkeypatch.setattr("quire.structured.matcher.MAX_FORCED", most)
        one = engine()
        plans, guide = itertools.count(), one.core.scheduler.guide
        monkeypatch.setattr(one.core.scheduler, "guide", lambda plan: (next(plans), guide(plan))[1])  # noqa: B023
        found.append(run(one, params))
        steps.append(next(plans))
    assert found[0] == found[1]
    assert steps[0] < steps[1] * 0.8


def test_no_process_outlives_the_engine() -> None:
    one = engine()
    run(one, [SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[ab]{5}"))])
    trials = one.core.scheduler.guidance._grammars.compiler.trials  # type: ignore[union-attr]
    (child,) = [trial._child for trial in trials if trial._child is not None]
    assert child.poll() is None
    one.shutdown()
    assert child.poll() is not None


def test_the_end() -> None:
    """A grammar's end is one, whatever min_tokens and ignore_eos say; where it may go on, they hold."""
    llm = LLM("demo", max_model_len=128)

    def ask(**fields: Any) -> tuple[str, str | None]:
        out = llm.generate("Once", SamplingParams(**({"temperature": 1.0, "seed": 1} | fields)), use_tqdm=False)
        return out[0].outputs[0].text, out[0].outputs[0].finish_reason

    yes = {"choice": ["yes"]}
    assert ask(structured_outputs=yes, ignore_eos=True, max_tokens=20) == ("yes", "stop")
    assert ask(structured_outputs=yes, min_tokens=10, max_tokens=20) == ("yes", "stop")
    text, reason = ask(structured_outputs={"regex": "[ab]*"}, ignore_eos=True, max_tokens=20)
    assert reason == "length"
    assert set(text) <= {"a", "b"}
    text, reason = ask(structured_outputs={"regex": "[ab]*"}, min_tokens=10, max_tokens=40)
    assert len(text) >= 10
    beams: dict[str, Any] = {"use_beam_search": True, "n": 2, "temperature": 0, "seed": None}
    assert ask(structured_outputs=yes, min_tokens=10, max_tokens=20, **beams) == ("yes", "stop")
    text, reason = ask(structured_outputs={"regex": "[ab]*"}, min_tokens=10, max_tokens=20, **beams)
    assert len(text) >= 10
    text, reason = ask(structured_outputs={"regex": "[ab]{5}"}, stop=["b"], max_tokens=40, logit_bias={70: 5.0})
    assert reason == "stop"
    text, reason = ask(structured_outputs={"json": PERSON}, max_tokens=3)
    assert reason == "length"


def test_the_end_of_a_model_without_an_end_token(tmp_path: Path) -> None:
    """The grammar's last token is text, as no token says that it has ended."""
    model = shutil.copytree(resolve_model_path("demo"), tmp_path / "demo")
    for name in ("config.json", "generation_config.json"):
        said = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(said | {"eos_token_id": None}))
    llm = LLM(str(model), max_model_len=128)
    for n in (1, 2):
        params = SamplingParams(n=n, structured_outputs=StructuredOutputsParams(choice=["yes", "no way"]))
        outputs = llm.generate("Once", params, use_tqdm=False)[0].outputs
        assert {(each.text in ("yes", "no way"), each.finish_reason) for each in outputs} == {(True, "stop")}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "object", "properties": {"a": {"not": {}}}}}, "'not' at #/properties/a"),
    ({"json": {"type": "string", "format": "no-such"}}, "no-such"),
    ({"json": {"type": "stringg"}}, "stringg"),
    ({"json": {"$ref": "#/$defs/gone"}}, "'#/\\$defs/gone' refers to nothing"),
    ({"json": {"$ref": "#"}}, "refers to itself without an end"),
    ({"json": "{"}, "no JSON"),
    ({"json": {"$ref": "https://example.com/x"}}, "not within the JSON schema"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-ahead"),
    ({"grammar": 'start: "a" nothing'}, "line 1, column 12: unknown name"),
    ({"grammar": 'root ::= "a" nothing'}, "GBNF"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "song"}}}, "'song'"),
    ({"json": False}, "nsatisfiable"),
]


def test_what_can_not_be_held_is_refused_with_the_reason() -> None:
    llm = LLM("demo", max_model_len=128)
    good = SamplingParams(max_tokens=4, structured_outputs={"choice": ["yes"]})
    for structure, reason in REFUSED:
        params = SamplingParams(max_tokens=4, structured_outputs=structure)
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            llm.generate(["a", "b"], [good, params], use_tqdm=False)
        assert str(caught.value).startswith("prompts[1] (of 2): structured_outputs can't be used: ")
        assert caught.value.param == "structured_outputs"
        assert not llm.llm_engine.has_unfinished_requests()
        llm.llm_engine.check_integrity()
        (fine,) = llm.generate("b", good, use_tqdm=False)
        assert (fine.outputs[0].text, fine.error) == ("yes", None)
    with pytest.raises(InvalidRequestError, match="^structured_outputs can't be used: "):
        llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(structured_outputs={"regex": "(a"}))
    without = LLM("demo", skip_tokenizer_init=True)
    with pytest.raises(InvalidRequestError, match="structured_outputs needs a tokenizer"):
        without.generate({"prompt_token_ids": [5]}, good)


AMBIGUOUS = 'start: e\ne: e e | "a" | "b" | "c"'  # of n letters there are all trees with n leaves


@pytest.mark.slow
def test_an_ambiguous_grammar_ends_its_own_request() -> None:
    one = engine()
    for name, structure in (("bomb", {"grammar": AMBIGUOUS}), ("golden", None)):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=450, structured_outputs=structure)
        one.add_request(name, PROMPTS[0], params)
    done = {output.request_id: output for output in iter_finished(one)}
    (bomb,), (golden,) = done["bomb"].outputs, done["golden"].outputs
    assert (bomb.finish_reason, golden.finish_reason) == ("error", "length")
    assert str(bomb.stop_reason).startswith("the grammar became too complex to follow: ")
    assert isinstance(done["bomb"].error, InvalidRequestError)
    one.add_request("again", PROMPTS[0], SamplingParams(temperature=0, ignore_eos=True, max_tokens=450))
    (again,) = iter_finished(one)
    assert again.outputs[0].token_ids == golden.token_ids
    one.check_integrity()


def iter_finished(one: LLMEngine) -> Iterator[Any]:
    while one.has_unfinished_requests():
        yield from (output for output in one.step() if output.finished)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["thread", "process"])
def test_behind_an_event_loop(where: Any) -> None:
    """Requests raise what is wrong with their own grammar, and nobody else notices."""

    async def last(llm: AsyncLLM, structure: dict[str, Any]) -> Any:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=64, structured_outputs=structure)
        return [output async for output in llm.generate("Once upon a time", params)][-1]

    async def serve() -> None:
        args = EngineArgs(model="demo", max_model_len=256)
        llm = AsyncLLM.from_engine_args(args, options=AsyncOptions(engine=where, log_level="error"))
        try:
            wanted = [*STRUCTURES, REFUSED[0][0]]
            found = await asyncio.gather(*[last(llm, structure) for structure in wanted], return_exceptions=True)
            assert isinstance(found[-1], InvalidRequestError)
            assert (found[-1].param, "'not' at #/properties/a" in str(found[-1])) == ("structured_outputs", True)
            for structure, output in zip(STRUCTURES, found[:-1], strict=True):
                assert not isinstance(output, BaseException), output
                part = output.outputs[0]
                assert part.finish_reason == "length" or is_formed(structure, part.text)
        finally:
            llm.shutdown()

    asyncio.run(serve())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "model"), [("eagle", "demo-eagle"), ("draft_model", "demo-draft")])
def test_a_drafted_end_ends_the_output(method: str, model: str) -> None:
    """What would follow it is drawn as well, and left: it must not fail for want of an allowed token."""
    prompt = "<|user|>Where have you been?<|end|><|assistant|>"
    form = StructuredOutputsParams(grammar="start: /(?s:.*)/\n")
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=form)
    config = {"method": method, "model": model, "adaptive": False}
    (plain,), (drafted,) = (
        LLM("demo", speculative_config=speculative).generate(prompt, params, use_tqdm=False)
        for speculative in (None, config)
    )
    assert drafted.outputs[0].finish_reason == plain.outputs[0].finish_reason == "stop"
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_an_interrupt_while_masks_are_made_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many grammars in one step their masks are made by another thread, which nothing overtakes."""
    llm = LLM("demo")
    params = [
        SamplingParams(structured_outputs={"regex": "[a-z ]{30}"}, temperature=1.0, seed=seed, max_tokens=40)
        for seed in range(10)
    ]
    prompts = ["Once upon a time"] * len(params)
    core = llm.llm_engine.core
    guide, submit, names = core.scheduler.guide, core.executor.submit, set[str]()

    def guided(*args: Any) -> Any:
        names.add(threading.current_thread().name)
        time.sleep(0.01)
        return guide(*args)

    monkeypatch.setattr(core.scheduler, "guide", guided)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    assert any(name.startswith("quire-masks") for name in names)
    names.clear()
    with monkeypatch.context() as patch:  # a device that computes by itself leaves the engine's thread free for them
        patch.setattr(core.executor, "computes_in_submit", False)
        assert [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert names == {threading.current_thread().name}
    count = 0

    def interrupted(plan: StepPlan) -> None:
        nonlocal count
        count += 1
        submit(plan)
        if count == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(core.executor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params, use_tqdm=False)
    core.check_integrity()
    assert not core.has_unfinished()
    assert [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert all(len(text) == 30 for text in expected)
