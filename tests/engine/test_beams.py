"""Beam search as users meet it, by `LLM`, `AsyncLLM` and the server: the same outputs, the same refusals by name."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quire import LLM, AsyncLLM, AsyncOptions, BeamSearchParams, EngineArgs, SamplingParams
from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.options import ServerArgs
from quire.entrypoints.server.state import ServerState
from quire.errors import InvalidRequestError
from quire.outputs import RequestOutput

OPTIONS: dict[str, Any] = {"model": "demo", "max_model_len": 128, "num_kv_blocks": 24, "max_num_seqs": 8, "debug": True}
BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0.0}
PROMPT = "Once upon a time"


class Doors:
    """The three, over one model."""

    def __init__(self, llm: LLM, async_llm: AsyncLLM, client: TestClient) -> None:
        self.llm, self.async_llm, self.client = llm, async_llm, client

    def asynchronous(self, params: SamplingParams, prompt: str = PROMPT) -> list[RequestOutput]:
        async def ask() -> list[RequestOutput]:
            return [output async for output in self.async_llm.generate(prompt, params)]

        assert self.client.portal is not None
        return self.client.portal.call(ask)


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    async_llm = AsyncLLM.from_engine_args(EngineArgs(**OPTIONS), options=AsyncOptions(engine="thread"))
    with TestClient(build_app(ServerState(async_llm, ServerArgs(), ["demo"]))) as client:
        yield Doors(LLM(**OPTIONS, show_progress=False), async_llm, client)
    async_llm.shutdown()


def test_the_three_find_the_same(doors: Doors) -> None:
    params = SamplingParams(**BEAMS, n=3, best_of=4, max_tokens=12, length_penalty=0.6, logprobs=2)
    (offline,) = doors.llm.generate(PROMPT, params, use_tqdm=False)
    *_, last = doors.asynchronous(params)
    fields = {**BEAMS, "n": 3, "best_of": 4, "max_tokens": 12, "length_penalty": 0.6, "logprobs": 2}
    answer = doors.client.post(
        "/v1/completions", json={"prompt": PROMPT, "return_token_ids": True, "temperature": None, **fields}
    ).json()
    assert [part.token_ids for part in last.outputs] == [part.token_ids for part in offline.outputs]
    assert [choice["token_ids"] for choice in answer["choices"]] == [part.token_ids for part in offline.outputs]
    assert [choice["text"] for choice in answer["choices"]] == [part.text for part in offline.outputs]
    assert answer["usage"]["completion_tokens"] == sum(len(part.token_ids) for part in offline.outputs)
    scores = []
    for part, choice in zip(offline.outputs, answer["choices"], strict=True):
        entries = part.logprobs or []
        found = [entry[token_id].logprob for entry, token_id in zip(entries, part.token_ids, strict=True)]
        assert part.cumulative_logprob == sum(found)
        assert choice["logprobs"]["token_logprobs"] == found
        assert {1, 2} <= {one.rank for one in entries[0].values()}, "the likeliest are shown besides"
        scores.append(sum(found) / len(found) ** 0.6)
    assert scores == sorted(scores, reverse=True)


def test_what_is_told_comes_once_and_whole(doors: Doors) -> None:
    (only,) = doors.asynchronous(SamplingParams(**BEAMS, n=4, max_tokens=9))
    assert only.finished
    assert [part.index for part in only.outputs] == [0, 1, 2, 3]
    assert all(part.cumulative_logprob is not None and part.logprobs is None for part in only.outputs)


def test_beam_search_as_vllm_has_it(doors: Doors) -> None:
    prompts = [PROMPT, {"prompt": "The old house"}, {"prompt_token_ids": [5, 6, 7]}]
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    found = doors.llm.beam_search(prompts, params)
    assert [len(output.sequences) for output in found] == [3, 3, 3]
    tokenizer = doors.llm.get_tokenizer()
    best = found[0].sequences[0]
    assert best.text is not None
    assert best.text == tokenizer.decode(best.tokens, skip_special_tokens=False)
    assert best.text.endswith(tokenizer.decode(best.tokens[-3:], skip_special_tokens=True))
    assert len(best.logprobs) == 8
    assert best.tokens[: len(tokenizer.encode(PROMPT))] == tokenizer.encode(PROMPT)
    assert best.cum_logprob == sum(next(iter(entry.values())).logprob for entry in best.logprobs)
    assert [s.cum_logprob for s in found[0].sequences] == sorted(s.cum_logprob for s in found[0].sequences)[::-1]
    assert (best.finish_reason, best.stop_reason) == ("length", None)
    assert doors.llm.beam_search(prompts, params, concurrency_limit=1) == found

    async def ask() -> list[RequestOutput]:
        return [output async for output in doors.async_llm.beam_search(PROMPT, "mine", params)]

    assert doors.client.portal is not None
    (only,) = doors.client.portal.call(ask)
    assert only.request_id == "mine"
    assert [only.prompt_token_ids + part.token_ids for part in only.outputs] == [s.tokens for s in found[0].sequences]


def test_the_token_that_ends_a_beam_is_text_where_asked(doors: Doors) -> None:
    (plain,) = doors.llm.generate(PROMPT, SamplingParams(**BEAMS, n=2, max_tokens=6), use_tqdm=False)
    stop = plain.outputs[0].token_ids[2]
    params = SamplingParams(**BEAMS, n=2, max_tokens=6, stop_token_ids=[stop])
    (cut,) = doors.llm.generate(PROMPT, params, use_tqdm=False)
    params.include_stop_str_in_output = True
    (shown,) = doors.llm.generate(PROMPT, params, use_tqdm=False)
    ended = [part for part in cut.outputs if part.finish_reason == "stop"]
    assert ended
    assert {part.stop_reason for part in ended} == {stop}
    tokenizer = doors.llm.get_tokenizer()
    for part, whole in zip(cut.outputs, shown.outputs, strict=True):
        if part.finish_reason == "stop":
            assert part.text == tokenizer.decode(part.token_ids[:-1], skip_special_tokens=True)
            assert whole.text == tokenizer.decode(whole.token_ids, skip_special_tokens=True)


def test_abort_and_neighbours(doors: Doors) -> None:
    """A client that leaves ends its beams; others get what they get alone."""
    params = SamplingParams(**BEAMS, n=4, max_tokens=40)
    (expected,) = doors.asynchronous(params)

    async def crowd() -> RequestOutput:
        async def one(prompt: str, params: SamplingParams) -> RequestOutput:
            *_, last = [output async for output in doors.async_llm.generate(prompt, params)]
            return last

        left = asyncio.create_task(one("It was", SamplingParams(**BEAMS, n=4, max_tokens=90)))
        drawn = asyncio.create_task(one("The old", SamplingParams(n=3, max_tokens=50)))
        mine = asyncio.create_task(one(PROMPT, params))
        await asyncio.sleep(0.02)
        left.cancel()
        await drawn
        return await mine

    assert doors.client.portal is not None
    found = doors.client.portal.call(crowd)
    assert [part.token_ids for part in found.outputs] == [part.token_ids for part in expected.outputs]
    doors.client.portal.call(doors.async_llm.check_integrity)


# (what is asked besides use_beam_search, the parameter that is named, the value that is told)
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 0.5}, "temperature", "0.5"),
    ({"top_p": 0.9}, "top_p", "0.9"),
    ({"top_k": 5}, "top_k", "5"),
    ({"min_p": 0.1}, "min_p", "0.1"),
    ({"seed": 7}, "seed", "7"),
    ({"presence_penalty": 1.0}, "presence_penalty", "1.0"),
    ({"frequency_penalty": 1.0}, "frequency_penalty", "1.0"),
    ({"repetition_penalty": 1.5}, "repetition_penalty", "1.5"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias", "5"),
    ({"stop": ["x"]}, "stop", "stop_token_ids"),
    ({"prompt_logprobs": 2}, "prompt_logprobs", "2"),
    ({"n": 3, "best_of": 2}, "best_of", "2"),
    ({"n": 0}, "n", "0"),
    ({"best_of": 0}, "best_of", "0"),
    ({"length_penalty": 11.0}, "length_penalty", "10"),
    ({"early_stopping": "often"}, "early_stopping", "never"),
    ({"best_of": 9}, "best_of", "max_num_seqs"),
    ({"n": 9}, "n", "max_num_seqs"),
    ({"n": 8, "max_tokens": 100}, "max_tokens", "Lower n"),
    ({"n": 8, "stop_token_ids": list(range(2500))}, "n", "16384"),
    ({"n": 4, "allowed_token_ids": [9]}, "", "lower n"),
]


@pytest.mark.parametrize(("fields", "param", "told"), REFUSED, ids=str)
def test_what_can_not_be_is_refused_by_name(doors: Doors, fields: dict[str, Any], param: str, told: str) -> None:
    asked = {"max_tokens": 5} | BEAMS | fields
    if param:
        with pytest.raises(InvalidRequestError) as offline:
            doors.llm.generate(PROMPT, SamplingParams(**asked), use_tqdm=False)
        with pytest.raises(InvalidRequestError) as asynchronous:
            doors.asynchronous(SamplingParams(**asked))
        assert offline.value.param == asynchronous.value.param == param
        assert told in str(offline.value)
        assert str(offline.value) == str(asynchronous.value)
    else:  # known when it is computed only
        (output,) = doors.llm.generate(PROMPT, SamplingParams(**asked), use_tqdm=False)
        assert [part.finish_reason for part in output.outputs] == ["length", "error", "error", "error"]
        assert told in str(output.outputs[1].stop_reason)
        with pytest.raises(InvalidRequestError, match=told):
            doors.asynchronous(SamplingParams(**asked))
    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        answer = doors.client.post(path, json={**prompt, **asked})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"] or "") == param
        assert told in error["message"]
    assert doors.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "fields", [{"temperature": 1.0}, {"beam_width": 0}, {"beam_width": 9}, {"max_tokens": 0}], ids=str
)
def test_beam_search_params_are_refused_by_name(doors: Doors, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields)) if fields != {"beam_width": 9} else "n = 9 beams"):
        doors.llm.beam_search(PROMPT, BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | fields)))


def test_what_is_no_beam_search_params_is_refused(doors: Doors) -> None:
    with pytest.raises(InvalidRequestError, match="^params must be BeamSearchParams; it is SamplingParams"):
        doors.llm.beam_search(PROMPT, SamplingParams())  # type: ignore[arg-type]
    wrong: list[Any] = [0, "x", 1.5, True, []]
    for limit in wrong:
        with pytest.raises(InvalidRequestError, match="^concurrency_limit must be an integer of at least 1, or None"):
            doors.llm.beam_search(PROMPT, BeamSearchParams(2, 4), concurrency_limit=limit)
    assert doors.llm.beam_search([], BeamSearchParams(2, 4)) == []


# --- exactness: the same outputs and floats, whatever runs beside them and however

ASKED: list[dict[str, Any]] = [
    {**BEAMS, "n": 2, "best_of": 4, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 2},
    {**BEAMS, "n": 3, "length_penalty": 0.0, "early_stopping": True, "logprobs": 0},
    {"temperature": 0.9, "seed": 3, "n": 3, "logprobs": 1},
    {**BEAMS, "n": 5, "early_stopping": "never", "min_tokens": 4, "logprobs": 1},
    {**BEAMS, "n": 2, "stop_token_ids": list(range(5, 400, 7)), "logprobs": 0},
]
BESIDE: list[dict[str, Any]] = [
    {},
    {"num_kv_blocks": 31, "block_size": 8, "max_num_seqs": 12},
    {"num_kv_blocks": 31, "block_size": 8, "enable_prefix_caching": False, "max_num_batched_tokens": 40},
    {"num_kv_blocks": 31, "block_size": 8, "swap_space": 0.1},
    {"block_size": 8, "max_num_batched_tokens": 11, "enable_chunked_prefill": True},
    {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}},
    {"speculative_config": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}},
]


def found_by(dtype: str, together: bool, **options: Any) -> tuple[list[Any], int]:
    """All that users see of the requests, and how often something was preempted."""
    base = {"model": "demo", "max_model_len": 128, "max_num_seqs": 16, "debug": True, "show_progress": False}
    llm = LLM(**(base | {"dtype": dtype} | options))
    prompts = [
        f"The old house {i % 2} stood at the edge of the wood, and nobody knew why. " + "It " * i for i in range(6)
    ]
    params = [SamplingParams(max_tokens=24 + 2 * i, **asked) for i, asked in enumerate(ASKED)]
    if together:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    else:
        pairs = zip(prompts, params, strict=True)
        outputs = [llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in pairs]
    llm.llm_engine.check_integrity()
    num_preempted = llm.get_metrics().num_preemptions_total
    return [[(p.token_ids, p.cumulative_logprob, p.logprobs) for p in o.outputs] for o in outputs], num_preempted


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Any]]:
    return {d: found_by(d, together=False, enable_prefix_caching=False)[0] for d in ("float32", "bfloat16")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beside", BESIDE, ids=str)
@pytest.mark.slow
def test_beams_are_the_same_whatever_runs_beside_them(
    alone: dict[str, list[Any]], dtype: str, beside: dict[str, Any]
) -> None:
    found, num_preempted = found_by(dtype, together=True, **beside)
    assert found == alone[dtype]
    assert num_preempted > 0 or "num_kv_blocks" not in beside, "nothing was preempted, so nothing was tested"
