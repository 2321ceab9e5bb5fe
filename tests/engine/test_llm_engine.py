"""`LLMEngine` stepped by hand: streams, aborts, forks, failures."""

import math
import time
from typing import Any

import pytest

from quire import EngineArgs, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from quire.errors import EngineDeadError, InvalidRequestError

PROMPT = "The children ran down to the river and"


@pytest.fixture(scope="module")
def shared_engine() -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(model="demo", max_num_seqs=8, debug=True), show_progress=False)


@pytest.fixture
def engine(shared_engine: LLMEngine):
    yield shared_engine
    assert not shared_engine.has_unfinished_requests()
    assert shared_engine.step() == []
    assert shared_engine.stats().kv_cache_usage_perc == 0
    shared_engine.check_integrity()


def drain(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    for outputs in found.values():
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True], "exactly one final output"
    return found


def params(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.9, "seed": 4, "max_tokens": 24, "ignore_eos": True} | options))


def test_deltas_add_up_to_the_whole(engine: LLMEngine) -> None:
    for kind in RequestOutputKind:
        engine.add_request(kind.name, PROMPT, params(output_kind=kind, stop=["zzzz", "qqq"], logprobs=1))
    found = drain(engine)
    (whole,) = found["FINAL_ONLY"]
    text, ids = whole.outputs[0].text, list(whole.outputs[0].token_ids)
    assert len(ids) == 24
    assert "".join(o.outputs[0].text for o in found["DELTA"]) == text
    assert [t for o in found["DELTA"] for t in o.outputs[0].token_ids] == ids
    assert sum(len(o.outputs[0].logprobs or []) for o in found["DELTA"]) == 24
    last = found["CUMULATIVE"][-1].outputs[0]
    assert (last.text, list(last.token_ids)) == (text, ids)
    lengths = [len(o.outputs[0].token_ids) for o in found["CUMULATIVE"]]
    assert lengths == sorted(lengths)


def test_text_that_is_made_in_the_end_is_the_streams(engine: LLMEngine) -> None:
    """Of who takes all at once it is: but for the stop token, and as far as what was aborted has come."""
    engine.add_request("aborted", PROMPT, params(output_kind=RequestOutputKind.FINAL_ONLY))
    for _ in range(6):
        assert engine.step() == []
    engine.abort_request("aborted")
    engine.add_request("free", PROMPT, params())
    found = drain(engine)
    aborted, free = found["aborted"][0].outputs[0], found["free"][-1].outputs[0]
    assert (len(aborted.token_ids), aborted.finish_reason) == (6, "abort")
    assert aborted.text == found["free"][5].outputs[0].text
    for kind in RequestOutputKind:
        engine.add_request(kind.name, PROMPT, params(output_kind=kind, stop_token_ids=[free.token_ids[9]]))
    found = drain(engine)
    whole, last = found["FINAL_ONLY"][0].outputs[0], found["CUMULATIVE"][-1].outputs[0]
    assert (whole.text, whole.token_ids, whole.finish_reason) == (last.text, last.token_ids, "stop")
    assert whole.text == "".join(output.outputs[0].text for output in found["DELTA"])
    assert free.text.startswith(whole.text)


def test_deltas_of_forks(engine: LLMEngine) -> None:
    engine.add_request("final", PROMPT, params(n=3, output_kind=RequestOutputKind.FINAL_ONLY))
    engine.add_request("delta", PROMPT, params(n=3, output_kind=RequestOutputKind.DELTA))
    found = drain(engine)
    texts = ["", "", ""]
    for output in found["delta"]:
        for completion in output.outputs:
            texts[completion.index] += completion.text
    assert texts == [c.text for c in found["final"][0].outputs]
    assert len(set(texts)) == 3


def test_abort_ends_with_one_final_output(engine: LLMEngine) -> None:
    engine.add_request("a", PROMPT, params(max_tokens=200))
    engine.add_request("b", PROMPT, params())
    engine.add_request("waiting", PROMPT, params(n=2))
    engine.abort_request("waiting")
    for _ in range(3):
        engine.step()
    engine.abort_request(["a", "unknown", "a"])
    found = drain(engine)
    (final,) = found["a"]
    assert final.outputs[0].finish_reason == "abort"
    assert len(final.outputs[0].token_ids) == 3
    assert found["b"][-1].outputs[0].finish_reason == "length"
    assert "waiting" not in found or all(c.finish_reason == "abort" for c in found["waiting"][-1].outputs)


def test_an_id_is_in_use_until_its_final_output_was_returned(engine: LLMEngine) -> None:
    engine.add_request("a", PROMPT, params())
    engine.abort_request("a")
    with pytest.raises(InvalidRequestError, match="request_id 'a' is in use") as error:
        engine.add_request("a", "Another prompt", params(max_tokens=3))
    assert error.value.param == "request_id"
    assert drain(engine)["a"][-1].prompt == PROMPT
    engine.add_request("a", "Another prompt", params(max_tokens=3))
    final = drain(engine)["a"][-1]
    assert (final.prompt, final.outputs[0].finish_reason) == ("Another prompt", "length")


def test_stop_string_ends_the_sequence_in_the_scheduler_too(engine: LLMEngine) -> None:
    engine.add_request("free", PROMPT, params(temperature=0))
    text = drain(engine)["free"][-1].outputs[0].text
    engine.add_request("cut", PROMPT, params(temperature=0, max_tokens=400, stop=[text[12:15]]))
    outputs = drain(engine)["cut"]
    assert outputs[-1].outputs[0].text == text[: text.index(text[12:15])]
    assert len(outputs) <= 24


def test_a_stream_never_shows_part_of_a_stop_string(engine: LLMEngine) -> None:
    engine.add_request("free", PROMPT, params(temperature=0))
    text = drain(engine)["free"][-1].outputs[0].text
    stop = text[9:17]
    engine.add_request("cut", PROMPT, params(temperature=0, stop=[stop], output_kind=RequestOutputKind.DELTA))
    shown = ""
    for output in drain(engine)["cut"]:
        shown += output.outputs[0].text
        assert text[: text.index(stop)].startswith(shown)
    assert shown == text[: text.index(stop)]


def test_request_ids(engine: LLMEngine) -> None:
    engine.add_request("same", PROMPT, params(max_tokens=2))
    with pytest.raises(InvalidRequestError, match="same"):
        engine.add_request("same", PROMPT, params(max_tokens=2))
    with pytest.raises(InvalidRequestError, match="request_id must be a non-empty string"):
        engine.add_request("", PROMPT, params())
    drain(engine)
    engine.add_request("same", PROMPT, params(max_tokens=2))
    assert drain(engine)["same"][-1].finished


@pytest.mark.parametrize("odd", ["x", True, [1.0], math.nan, math.inf])
def test_an_arrival_is_a_time(engine: LLMEngine, odd: Any) -> None:
    """Policies and snapshots count from it, those of other requests as well."""
    with pytest.raises(InvalidRequestError, match="^arrival_time must be seconds of a clock; it is "):
        engine.add_request("a", PROMPT, params(), arrival_time=odd)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest", "deadline"])
def test_an_arrival_is_told_by_the_wall_clock(policy: str) -> None:
    """As vLLM's callers do: whoever says when a request came is not behind all who do not."""
    options = EngineArgs(model="demo", max_num_seqs=1, scheduling_policy=policy)  # type: ignore[arg-type]
    engine = LLMEngine.from_engine_args(options, show_progress=False)
    came, late = time.time() - 5, time.time() + 1e6
    for name, at in [("running", None), ("late", late), ("told", came), ("twin", came), ("untold", None)]:
        engine.add_request(name, PROMPT, params(max_tokens=4), arrival_time=at)
    found = {name: outputs[-1].metrics for name, outputs in drain(engine).items()}
    assert found["told"].arrival_time == pytest.approx(came, abs=0.1)
    assert found["untold"].arrival_time == pytest.approx(time.time(), abs=60)
    assert found["late"].arrival_time < late - 9e5, "nothing comes in the future"
    assert 5 < found["told"].time_in_queue < 65
    if policy == "priority":
        order = sorted(found, key=lambda name: found[name].first_scheduled_time)
        assert order.index("told") < order.index("twin") < order.index("late") < order.index("untold")
    engine.shutdown()


def test_the_callers_params_stay_theirs(engine: LLMEngine) -> None:
    mine = params(max_tokens=6, best_of=2, n=1)
    engine.add_request("r", PROMPT, mine)
    assert mine.logprobs is None
    mine.max_tokens = 1
    assert len(drain(engine)["r"][-1].outputs[0].token_ids) == 6


def test_priorities() -> None:
    args = EngineArgs(model="demo", max_num_seqs=1, scheduling_policy="priority")
    engine = LLMEngine.from_engine_args(args, show_progress=False)
    for name, priority in (("late", 5), ("early", -1), ("middle", 0)):
        engine.add_request(name, PROMPT, params(max_tokens=3), priority=priority)
    order = []
    while engine.has_unfinished_requests():
        order += [o.request_id for o in engine.step() if o.finished]
    assert order == ["early", "middle", "late"]


def test_what_can_never_fit_is_refused() -> None:
    args = EngineArgs(model="demo", num_kv_blocks=4, block_size=8)
    engine = LLMEngine.from_engine_args(args, show_progress=False)
    assert engine.config.model.max_model_len == 32
    with pytest.raises(InvalidRequestError, match="32 tokens"):
        engine.add_request("long", [5] * 40, params())
    engine.add_request("fits", [5] * 31, params(max_tokens=None))
    assert len(drain(engine)["fits"][-1].outputs[0].token_ids) == 1


def test_a_failed_step_kills_the_engine_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model="demo"), show_progress=False)
    engine.add_request("r", PROMPT, params())

    def fail(plan):
        raise MemoryError("no memory left")

    monkeypatch.setattr(engine.executor, "submit", fail)
    with pytest.raises(EngineDeadError):
        engine.step()
    with pytest.raises(EngineDeadError, match="MemoryError"):
        engine.add_request("next", PROMPT, params())
    assert engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="MemoryError"):  # never a loop of empty steps
        engine.step()


def test_request_timings() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model="demo", max_num_seqs=1), show_progress=False)
    for name in ("first", "second"):
        engine.add_request(name, PROMPT, params(max_tokens=4))
    found = {name: outputs[-1].metrics for name, outputs in drain(engine).items()}
    for metrics in found.values():
        assert metrics is not None
        assert metrics.first_scheduled_time is not None
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert found["second"].first_scheduled_time >= found["first"].finished_time, "there was one place to run in"
    engine = LLMEngine.from_engine_args(EngineArgs(model="demo", disable_log_stats=True), show_progress=False)
    engine.add_request("untimed", PROMPT, params(max_tokens=4))
    assert drain(engine)["untimed"][-1].metrics is None


def test_cache_salt_keeps_prefixes_apart() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model="demo", block_size=8), show_progress=False)
    ids = list(range(100, 140))

    def cached(salt: str | None) -> int | None:
        prompt = {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})
        engine.add_request("r", prompt, params(max_tokens=1))  # type: ignore[arg-type]
        return drain(engine)["r"][-1].num_cached_tokens

    assert [cached(None), cached(None), cached("a"), cached("a"), cached("b"), cached(None)] == [0, 32, 0, 32, 0, 32]
    assert engine.core.reset_prefix_cache()
    assert cached(None) == 0


def test_prefixes_are_forgotten_while_requests_run() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model="demo", block_size=8), show_progress=False)
    engine.add_request("alone", PROMPT, params(max_tokens=12))
    expected = drain(engine)["alone"][-1].outputs[0].token_ids
    engine.add_request("forgotten", PROMPT, params(max_tokens=12))
    for _ in range(3):
        engine.step()
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert engine.core.stats().kv_cache_usage_perc == 0
    last = drain(engine)["forgotten"][-1]
    assert last.outputs[0].token_ids == expected


def test_a_request_whose_state_breaks_fails_alone(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.worker import runner as model_runner

    class Fragile(model_runner.SamplingState):
        def __init__(self, params: SamplingParams, *args, **options) -> None:
            if params.top_k == 13:
                raise OverflowError("what nobody has thought of")
            super().__init__(params, *args, **options)

    engine.add_request("alone", PROMPT, params())
    alone = drain(engine)["alone"][-1].outputs
    monkeypatch.setattr(model_runner, "SamplingState", Fragile)
    engine.add_request("good", PROMPT, params())
    engine.add_request("bad", PROMPT, params(top_k=13))
    found = drain(engine)
    assert found["good"][-1].outputs == alone
    assert found["bad"][-1].outputs[0].finish_reason == "error"
    assert "OverflowError" in str(found["bad"][-1].outputs[0].stop_reason)
