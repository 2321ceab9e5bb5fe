"""AsyncLLM over both of its transports: the outputs of LLM, and no request that is lost, leaked or left waiting."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import quire
from quire import LLM, AsyncLLM, AsyncOptions, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from quire.engine.clients.process import ProcessClient
from quire.engine.observer import Observer
from quire.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    QuireError,
    RequestFailedError,
)
from quire.outputs import RequestOutput
from quire.protocol.core import Reply

Run = Callable[[Coroutine[Any, Any, Any]], Any]
ARGS = EngineArgs(model="demo", debug=True, num_kv_blocks=256)
PROMPTS = ["Once upon a time", "The old house stood", "It was a bright morning in spring when the two of them"]


class Engine:
    """An AsyncLLM with the event loop that it lives on."""

    def __init__(self, llm: AsyncLLM, runner: asyncio.Runner) -> None:
        self.llm = llm
        self.run: Run = runner.run

    async def collect(self, prompt: Any, params: SamplingParams, request_id: str | None = None) -> list[RequestOutput]:
        return [output async for output in self.llm.generate(prompt, params, request_id)]

    async def when_idle(self) -> None:
        """Wait until the engine holds nothing, and check that it does not."""
        deadline = time.monotonic() + 10
        while True:
            snapshot = await self.llm.snapshot()
            if not snapshot.num_sequences:
                break
            assert time.monotonic() < deadline, "requests were left behind"
            await asyncio.sleep(0.01)
        assert 2 not in snapshot.blocks
        await self.llm.check_integrity()
        assert self.llm.num_unfinished == len(self.llm._admission.queued) == 0


@pytest.fixture(scope="module", params=["process", "thread"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with asyncio.Runner() as runner:
        options = AsyncOptions(engine=request.param, log_level="warning")
        engine = Engine(AsyncLLM.from_engine_args(ARGS, options=options), runner)
        yield engine
        engine.run(engine.when_idle())
        engine.llm.shutdown()
        engine.llm.shutdown()


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM("demo", num_kv_blocks=256)


def test_outputs_equal_those_of_llm(engine: Engine, offline: LLM) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.9, seed=5, max_tokens=40, stop=["e "], n=3),
        SamplingParams(temperature=1.0, seed=6, max_tokens=25, n=2, best_of=4, logprobs=0),
        SamplingParams(
            temperature=0.7, seed=7, max_tokens=20, ignore_eos=True, logit_bias={50: 3.0}, bad_words=["the"]
        ),
    ]
    cases = [(prompt, p) for prompt in PROMPTS for p in params]
    expected = offline.generate([prompt for prompt, _ in cases], [p for _, p in cases], use_tqdm=False)

    async def all_at_once() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(engine.collect(prompt, p) for prompt, p in cases))

    for outputs, one in zip(engine.run(all_at_once()), expected, strict=True):
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs == one.outputs
        assert outputs[-1].prompt_logprobs == one.prompt_logprobs
        assert outputs[-1].prompt_token_ids == one.prompt_token_ids


@pytest.mark.parametrize("slow", [False, True])
def test_deltas_add_up_however_slow_the_reader_is(engine: Engine, slow: bool) -> None:
    params = SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=40, logprobs=1, ignore_eos=True)
    whole = engine.run(engine.collect(PROMPTS[0], params))[-1].outputs
    deltas = params.clone()
    deltas.output_kind = RequestOutputKind.DELTA

    async def read() -> tuple[list[str], list[list[int]], list[list[Any]], int]:
        text, ids, logprobs, count = ["", ""], [[], []], [[], []], 0
        async for output in engine.llm.generate(PROMPTS[0], deltas):
            count += 1
            for part in output.outputs:
                text[part.index] += part.text
                ids[part.index] += part.token_ids
                logprobs[part.index] += part.logprobs or []
            if slow:
                await asyncio.sleep(0.2)
        return text, ids, logprobs, count

    text, ids, logprobs, count = engine.run(read())
    assert text == [part.text for part in whole]
    assert ids == [part.token_ids for part in whole]
    assert logprobs == [part.logprobs for part in whole]
    if slow:
        assert count < 40


def test_final_only_yields_once(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY)
    assert [o.finished for o in engine.run(engine.collect(PROMPTS[0], params))] == [True]


def test_an_arrival_is_told_by_the_wall_clock(engine: Engine) -> None:
    came = time.time() - 5
    output = engine.run(_last(engine.llm.generate("Once", SamplingParams(max_tokens=2), arrival_time=came)))
    assert output.metrics.arrival_time == pytest.approx(came, abs=0.1)
    assert 5 < output.metrics.time_in_queue < 65


def test_leaving_the_iterator_aborts(engine: Engine) -> None:
    async def leave() -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        async for _ in engine.llm.generate(PROMPTS[0], params, "left"):
            break
        reader = asyncio.create_task(engine.collect(PROMPTS[1], params, "cancelled"))
        while engine.llm.stats().num_requests_running == 0:
            await asyncio.sleep(0.001)
        reader.cancel()
        await engine.when_idle()

    engine.run(leave())


class Endings(Observer):
    """Hears how requests end: each sequence's reason, and the tokens that the prefix cache had."""

    def __init__(self) -> None:
        self.heard: list[tuple[list[str], int]] = []

    def on_finished(self, request_id: str, reasons: list[str], num_cached_tokens: int, now: float) -> None:
        self.heard.append((reasons, num_cached_tokens))


def test_the_end_of_a_request_that_is_left_is_told_in_full(engine: Engine) -> None:
    prompt = {"prompt_token_ids": [*range(100, 180)]}

    async def leave() -> None:
        await engine.collect(prompt, SamplingParams(max_tokens=1))
        engine.llm.observer = endings = Endings()
        params = SamplingParams(max_tokens=400, ignore_eos=True, n=3, temperature=1.0)
        async for _ in engine.llm.generate(prompt, params, "left"):
            break
        await engine.when_idle()
        engine.llm.observer = Observer()
        assert endings.heard == [(["abort"] * 3, 64)]

    engine.run(leave())


def test_abort_by_id_ends_the_iterator(engine: Engine) -> None:
    async def abort() -> RequestOutput:
        outputs = []
        async for output in engine.llm.generate(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True), "one"):
            outputs.append(output)
            if len(outputs) == 2:
                await engine.llm.abort("one")
        return outputs[-1]

    last = engine.run(abort())
    assert last.finished
    assert last.request_id == "one"
    assert last.outputs[0].finish_reason == "abort"


@pytest.mark.slow
def test_what_runs_is_ended_or_waited_for_when_it_is_to_sleep(engine: Engine) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)

    async def sleep_beside(mode: Any) -> tuple[bool, str | None]:
        running = asyncio.create_task(engine.collect(PROMPTS[0], params))
        while not engine.llm.stats().num_requests_running:
            await asyncio.sleep(0.001)
        slept = await engine.llm.sleep(1, mode)
        (output,) = await running
        await engine.llm.wake_up()
        return slept, output.outputs[0].finish_reason

    assert engine.run(sleep_beside(None)) == (False, "length")
    assert engine.run(sleep_beside("abort")) == (True, "abort")
    assert engine.run(sleep_beside("wait")) == (True, "length")


def test_what_a_pause_keeps_is_ended_when_it_is_to_sleep_so(engine: Engine) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)

    async def check() -> None:
        running = asyncio.create_task(engine.collect(PROMPTS[0], params))
        while not engine.llm.stats().num_requests_running:
            await asyncio.sleep(0.001)
        await engine.llm.pause_generation(mode="keep")
        assert await engine.llm.sleep(1, "abort")
        [*_, output] = await asyncio.wait_for(running, 5)
        assert output.outputs[0].finish_reason == "abort"
        await engine.llm.wake_up()
        await engine.llm.resume_generation()
        await engine.when_idle()

    engine.run(check())


@pytest.mark.slow
def test_what_runs_is_kept_while_it_sleeps(engine: Engine) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)

    async def check() -> None:
        (whole,) = await engine.collect(PROMPTS[0], params)
        running = asyncio.create_task(engine.collect(PROMPTS[0], params))
        while not engine.llm.stats().num_requests_running:
            await asyncio.sleep(0.001)
        assert await engine.llm.sleep(2, "keep")
        await asyncio.wait([running], timeout=0.2)
        assert not running.done()
        with pytest.raises(OverloadedError):
            await engine.collect(PROMPTS[1], params)
        await engine.llm.wake_up(["weights"])
        await engine.llm.wake_up()
        (output,) = await running
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids
        await engine.when_idle()

    engine.run(check())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_event_loops_take_turns(kind: Any) -> None:
    """As `asyncio.run` makes one for each call; one that is still there is not taken from."""
    llm = AsyncLLM.from_engine_args(ARGS, options=AsyncOptions(engine=kind, log_level="warning"))

    async def ask() -> str:
        params = SamplingParams(max_tokens=5, temperature=0.0)
        async with asyncio.timeout(30):
            return [output.outputs[0].text async for output in llm.generate(PROMPTS[0], params)][-1]

    try:
        first = asyncio.run(ask())
        with asyncio.Runner() as runner:
            assert runner.run(ask()) == first
            with pytest.raises(QuireError, match="the engine serves another event loop, which is not closed"):
                asyncio.run(ask())
            assert runner.run(ask()) == first
    finally:
        llm.shutdown()


def test_odd_arguments_are_refused_by_name(engine: Engine) -> None:
    async def last(outputs: Any) -> None:
        async for _ in outputs:
            pass

    llm: Any = engine.llm
    with pytest.raises(InvalidRequestError, match="^pooling_params must be PoolingParams, or None; it is 5"):
        engine.run(last(llm.encode("a", 5, "r")))
    with pytest.raises(InvalidRequestError, match="^pooling_params must be PoolingParams, or None; it is Sampling"):
        engine.run(last(llm.encode("a", SamplingParams(), "r")))
    for odd in (5, None, [5], [None]):
        with pytest.raises(InvalidRequestError, match="^request_id must be a list of "):
            engine.run(llm.abort(odd))
    for odd in ([], None, 5):
        with pytest.raises(InvalidRequestError, match="^name must be a string, as pin_prefix returned it; it is "):
            engine.run(llm.unpin_prefix(odd))
    engine.run(llm.abort({"nobody's"}))


def test_an_abort_while_the_prompt_is_encoded_is_not_lost(engine: Engine) -> None:
    """A long prompt is encoded in a thread: when the abort comes, the engine has not heard of the request."""
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, truncate_prompt_tokens=9)

    async def abort() -> list[RequestOutput]:
        task = asyncio.create_task(engine.collect("Once upon a time there was. " * 80, params, "early"))
        await asyncio.sleep(0)  # the thread has it, and the loop has not come back to hear its result
        await engine.llm.abort("early")
        return await task

    last = engine.run(abort())[-1]
    assert last.outputs[0].finish_reason == "abort"
    assert last.request_id == "early"


def test_ids_may_be_used_twice_at_once(engine: Engine) -> None:
    async def both() -> list[list[RequestOutput]]:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        return await asyncio.gather(*(engine.collect(prompt, params, "same") for prompt in PROMPTS[:2]))

    first, second = engine.run(both())
    assert first[-1].prompt != second[-1].prompt
    assert first[-1].request_id == second[-1].request_id == "same"


def test_a_refused_request_says_why_and_harms_nobody(engine: Engine) -> None:
    async def attempt() -> None:
        good = asyncio.create_task(engine.collect(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=50)))
        for prompt, params, param in [
            ([], SamplingParams(), "prompt"),
            ([1, -1], SamplingParams(), "prompt"),
            ([1] * 5000, SamplingParams(), "prompt"),
            ("x", SamplingParams(logprobs=21), "logprobs"),
            ("x", SamplingParams(stop_token_ids=[10**6]), "stop_token_ids"),
        ]:
            with pytest.raises(InvalidRequestError) as caught:
                await engine.collect(prompt, params)
            assert caught.value.param == param
        assert len((await good)[-1].outputs[0].token_ids) == 50

    engine.run(attempt())


def test_chats_by_the_models_template_and_by_a_strangers(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Hi"}]

    async def render() -> None:
        text = await engine.llm.render_chat(messages, chat_template="<{{ messages[0].content }}>")
        assert text == "<Hi>"
        with pytest.raises(InvalidRequestError, match="no valid Jinja"):
            await engine.llm.render_chat(messages, chat_template="{% if %}")
        assert "Hi" in await engine.llm.render_chat(messages)

    engine.run(render())


def test_a_text_with_a_token_that_the_model_lacks_harms_no_neighbour(tmp_path: Path) -> None:
    files = Path(quire.__file__).parent / "demo"
    shutil.copy(files / "tokenizer_config.json", tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(files / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|extra|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    args = EngineArgs(model="demo", tokenizer=str(tmp_path), num_kv_blocks=64)
    llm = AsyncLLM.from_engine_args(args, options=AsyncOptions(engine="thread"))

    async def both() -> list[Any]:
        async def one(prompt: str) -> list[RequestOutput]:
            return [output async for output in llm.generate(prompt, SamplingParams(max_tokens=50, ignore_eos=True))]

        return await asyncio.gather(one("Hello"), one("Hello <|extra|>"), return_exceptions=True)

    innocent, stranger = asyncio.run(both())
    llm.shutdown()
    assert len(innocent[-1].outputs[0].token_ids) == 50
    assert isinstance(stranger, InvalidRequestError)
    assert "'<|extra|>' (id 4096)" in str(stranger)


def test_options_of_the_wrong_kind_are_refused_at_once() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"engine": "x"}, "engine must be one of 'process', 'thread', got 'x'"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs must be an integer, at least 0, got -1"),
        ({"log_level": "x"}, "log_level must be one of 'debug', 'info', .*, got 'x'"),
        ({"step_timeout": "x"}, "step_timeout must be a number, over 0, got 'x'"),
        ({"step_timeout": 0.0}, "step_timeout must be a number, over 0, got 0.0"),
    ]
    for given, message in wrong:
        with pytest.raises(ConfigError, match=message):
            AsyncOptions(**given)
    for kind in (AsyncLLM, LLMEngine):
        with pytest.raises(ConfigError, match=r"^engine_args must be EngineArgs\(\.\.\.\), got 'demo'\.$"):
            kind.from_engine_args("demo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^options must be AsyncOptions\(\.\.\.\), got {'engine': 'thread'}\.$"):
        AsyncLLM.from_engine_args(ARGS, options={"engine": "thread"})  # type: ignore[arg-type]


def test_arguments_of_the_wrong_kind_are_named(engine: Engine) -> None:
    llm: Any = engine.llm
    asked: list[tuple[Callable[[], Coroutine[Any, Any, Any]], str]] = [
        (lambda: llm.token_ids(5), "text must be a text; it is 5"),
        (lambda: llm.collective_rpc("reset", args=5), "args must be a tuple; it is 5"),
        (lambda: llm.collective_rpc(len), "method must be the name of a method; it is <built-in function len>"),
        (lambda: llm.sleep(1, "nope"), "mode must be 'abort', 'wait', 'keep' or None; it is 'nope'"),
    ]
    for ask, message in asked:
        with pytest.raises(InvalidRequestError, match=message):
            engine.run(ask())
    with pytest.raises(InvalidRequestError, match=r"params must be BeamSearchParams; it is SamplingParams\("):
        llm.beam_search("x", None, SamplingParams())


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_wait_while_it_is_paused(engine: Engine, mode: str) -> None:
    """Those that run are ended, or finish; those that come meanwhile run, whole, once it goes on."""
    llm, params = engine.llm, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)

    async def check() -> None:
        whole = (await engine.collect(PROMPTS[0], params))[-1].outputs[0].token_ids
        before = llm.generate(PROMPTS[0], params)
        await anext(before)
        await llm.pause_generation(mode=mode)
        assert await llm.is_paused()
        *_, last = [output async for output in before]
        assert (last.outputs[0].finish_reason, last.num_cached_tokens) == ("length" if mode == "wait" else "abort", 0)
        after = asyncio.create_task(engine.collect(PROMPTS[0], params))
        left = asyncio.create_task(engine.collect(PROMPTS[1], params))
        done, _ = await asyncio.wait([after, left], timeout=0.3)
        assert not done
        assert (await llm.snapshot()).num_sequences == 0
        left.cancel()
        await llm.resume_generation()
        assert not await llm.is_paused()
        assert (await after)[-1].outputs[0].token_ids == whole
        with pytest.raises(InvalidRequestError, match="mode must be 'abort', 'wait' or 'keep'; it is 'later'"):
            await llm.pause_generation(mode="later")
        assert not await llm.is_paused()
        await llm.pause_generation(wait_for_inflight_requests=True, clear_cache=False)
        await llm.resume_generation()
        await engine.when_idle()

    engine.run(check())


def test_requests_whose_prompts_are_encoded_in_a_pause_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, params, prepare = (
        engine.llm,
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
        engine.llm.prepare,
    )

    async def check() -> None:
        encoding, encoded = asyncio.Event(), asyncio.Event()

        async def slow(*arguments: Any) -> Any:
            encoding.set()
            await encoded.wait()
            return await prepare(*arguments)

        monkeypatch.setattr(llm, "prepare", slow)
        late = asyncio.create_task(engine.collect(PROMPTS[0], params))
        await encoding.wait()
        await llm.pause_generation(mode="wait")
        encoded.set()
        done, _ = await asyncio.wait([late], timeout=0.3)
        assert not done
        assert (await llm.snapshot()).num_sequences == 0
        await llm.resume_generation()
        assert (await late)[-1].outputs[0].finish_reason == "length"
        await engine.when_idle()

    engine.run(check())


@pytest.mark.parametrize("clear_cache", [True, False])
def test_requests_are_kept_in_a_pause(engine: Engine, clear_cache: bool) -> None:
    """No token comes meanwhile, none is lost or another than without it, and one that is kept can be ended."""
    llm, greedy = engine.llm, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    drawn = SamplingParams(n=3, seed=3, max_tokens=60, ignore_eos=True, logprobs=2, presence_penalty=0.5)

    async def check() -> None:
        expected = [(await engine.collect(PROMPTS[0], params))[-1] for params in (greedy, drawn)]
        running = [asyncio.create_task(engine.collect(PROMPTS[0], params)) for params in (greedy, drawn)]
        ended = asyncio.create_task(engine.collect(PROMPTS[1], greedy, "ended"))
        while llm.stats().num_requests_running < 5:
            await asyncio.sleep(0.001)
        await llm.pause_generation(mode="keep", clear_cache=clear_cache)
        assert await llm.is_paused()
        await llm.abort("ended")
        assert (await ended)[-1].outputs[0].finish_reason == "abort"
        later = asyncio.create_task(engine.collect(PROMPTS[0], greedy))
        before = (await llm.snapshot()).sequences
        assert [(s.status, s.num_computed_tokens, s.num_blocks) for s in before] == [("waiting", 0, 0)] * 4
        await asyncio.wait([later, *running], timeout=0.3)
        after = (await llm.snapshot()).sequences
        assert [s.num_output_tokens for s in after] == [s.num_output_tokens for s in before]
        assert not any(task.done() for task in [*running, later])
        await llm.resume_generation()
        outputs = [(await task)[-1] for task in [*running, later]]
        for output, whole in zip(outputs, [*expected, expected[0]], strict=True):
            assert [part.token_ids for part in output.outputs] == [part.token_ids for part in whole.outputs]
            assert [part.logprobs for part in output.outputs] == [part.logprobs for part in whole.outputs]
        await engine.when_idle()

    engine.run(check())


def test_a_pause_ends_with_the_engine() -> None:
    """Though a request that runs is not read meanwhile."""
    llm = AsyncLLM.from_engine_args(ARGS, options=AsyncOptions(log_level="critical"))

    async def check() -> None:
        running = llm.generate("x", SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(running)
        assert isinstance(llm.client, ProcessClient)
        os.kill(llm.client.pid, signal.SIGSTOP)
        pausing = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0.05)
        llm._on_event(Reply(max(llm._calls)))  # as if it died just after that
        os.kill(llm.client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(pausing, 10)
        await running.aclose()

    asyncio.run(check())
    llm.shutdown()


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_requests_that_wait_in_a_pause_can_be_ended(engine: Engine, mode: str) -> None:
    """At once, though the engine never hears of them, or sleeps; others wait on."""
    llm, params = engine.llm, SamplingParams(n=2, max_tokens=3, ignore_eos=True)

    async def check() -> None:
        await llm.pause_generation(mode=mode)
        ended, other = (asyncio.create_task(engine.collect(PROMPTS[0], params, name)) for name in ("ended", "other"))
        await asyncio.sleep(0.05)
        assert await llm.sleep()
        await llm.abort("ended")
        [last] = await asyncio.wait_for(ended, 5)
        assert last.finished
        assert [(part.finish_reason, part.token_ids) for part in last.outputs] == [("abort", [])] * 2
        assert not other.done()
        await llm.wake_up()
        await llm.resume_generation()
        assert [part.finish_reason for part in (await other)[-1].outputs] == ["length"] * 2
        await engine.when_idle()

    engine.run(check())


def test_requests_that_wait_in_a_pause_hear_of_the_end() -> None:
    llm = AsyncLLM.from_engine_args(ARGS, options=AsyncOptions(engine="thread", log_level="error"))

    async def check() -> None:
        await llm.pause_generation()
        waiting = asyncio.create_task(Engine(llm, asyncio.Runner()).collect("x", SamplingParams(max_tokens=1)))
        await asyncio.sleep(0.05)
        llm.end_requests()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(waiting, 10)

    asyncio.run(check())
    llm.shutdown()


def test_an_engine_that_died_while_no_loop_ran_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM.from_engine_args(ARGS, options=AsyncOptions(engine="thread", log_level="error"))

    def check() -> None:
        raise EngineDeadError("a worker is gone")

    client: Any = llm.client
    monkeypatch.setattr(client.core.executor, "check", check)
    client._thread.join(10)  # it looks once a second

    async def ask() -> None:
        async with asyncio.timeout(10):
            await Engine(llm, asyncio.Runner()).collect("x", SamplingParams(max_tokens=1))

    with pytest.raises(EngineDeadError, match="no sign of life"):
        asyncio.run(ask())
    llm.shutdown()


def test_logits_processors_need_the_thread() -> None:
    def only_seven(output_ids: list[int], logits: Any) -> Any:
        logits[:] = -1e9
        logits[7] = 0
        return logits

    def broken(output_ids: list[int], logits: Any) -> Any:
        raise ValueError("no")

    async def use(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=3, ignore_eos=True, logits_processors=[only_seven])
        outputs = [output async for output in llm.generate("x", params)]
        assert outputs[-1].outputs[0].token_ids == [7, 7, 7]
        with pytest.raises(RequestFailedError):
            _ = [output async for output in llm.generate("x", SamplingParams(logits_processors=[broken]))]

    llm = AsyncLLM.from_engine_args(ARGS, options=AsyncOptions(engine="thread"))
    asyncio.run(use(llm))
    llm.shutdown()


def test_the_queue_is_bounded() -> None:
    args = EngineArgs(model="demo", max_num_seqs=2, num_kv_blocks=64, debug=True)
    llm = AsyncLLM.from_engine_args(args, options=AsyncOptions(engine="thread", max_num_queued_reqs=3))

    async def crowd() -> list[Any]:
        params = SamplingParams(max_tokens=30, ignore_eos=True)

        async def one() -> int:
            outputs = [output async for output in llm.generate("x", params)]
            return len(outputs[-1].outputs[0].token_ids)

        return await asyncio.gather(*(one() for _ in range(20)), return_exceptions=True)

    results = asyncio.run(crowd())
    llm.shutdown()
    assert results.count(30) == 5  # two places and three in the queue
    assert sum(isinstance(r, OverloadedError) for r in results) == 15


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (EngineArgs(model="/nonexistent-model"), ModelLoadError),
        pytest.param(EngineArgs(model="demo", kv_cache_memory=1), ConfigError, marks=pytest.mark.slow),
    ],
)
def test_what_prevents_the_start_is_told(args: EngineArgs, error: type[Exception]) -> None:
    with pytest.raises(error):
        AsyncLLM.from_engine_args(args)


def _child_of(llm: AsyncLLM) -> subprocess.Popen[bytes]:
    assert isinstance(llm.client, ProcessClient)
    return llm.client._process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_hangs_is_noticed_by_all_who_wait(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.clients.process.CLOSE_SECONDS", 0.1)  # which would be waited for in vain
    llm = AsyncLLM.from_engine_args(ARGS, options=AsyncOptions(log_level="error", step_timeout=1.0))
    directory = llm.client._directory  # type: ignore[attr-defined]
    llm.observer = endings = Endings()

    async def wait() -> None:
        params = SamplingParams(max_tokens=490, ignore_eos=True)

        async def one() -> None:
            async for _ in llm.generate("x", params):
                pass

        waiters = [asyncio.create_task(one()) for _ in range(3)]
        while llm.stats().num_requests_running < 3:
            await asyncio.sleep(0.001)
        os.kill(_child_of(llm).pid, number)
        results = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 10)
        assert [type(result) for result in results] == [EngineDeadError] * 3
        assert endings.heard == [(["error"], 0)] * 3
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await llm.snapshot()
        assert "dead" in str(await asyncio.wait_for(llm.wait_dead(), 10))

    asyncio.run(wait())
    llm.shutdown()
    assert _child_of(llm).poll() is not None
    assert not os.path.exists(directory)


def test_a_snapshot_has_those_with_a_mark_whoever_comes_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.scheduler.scheduler.MAX_SEQUENCES", 0)  # an engine on a thread has no first ones then

    async def look() -> list[list[str]]:
        params = SamplingParams(max_tokens=490, ignore_eos=True)
        tasks = [asyncio.create_task(engine.collect("Once", params, name)) for name in ("one", "page-1", "page-2")]
        while (await engine.llm.snapshot()).num_sequences < 3:
            await asyncio.sleep(0.001)
        found = [await engine.llm.snapshot(mark) for mark in (None, "page-", "gone")]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [sorted(sequence.request_id for sequence in one.sequences) for one in found]

    everybody = ["one", "page-1", "page-2"]
    first = engine.run(look())
    assert first in ([everybody] * 3, [[], everybody[1:], []])  # of an engine in a process, and on a thread


@pytest.mark.slow
@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_engine_goes_when_its_parent_is_killed(busy: bool) -> None:
    script = f"""
        import asyncio
        from quire import AsyncLLM, EngineArgs, SamplingParams
        llm = AsyncLLM.from_engine_args(EngineArgs(model="demo"))

        async def main():
            print(llm.client._process.pid, llm.client._directory, flush=True)
            params = SamplingParams(max_tokens=490, ignore_eos=True)
            while {busy}:
                async for _ in llm.generate("x", params):
                    pass
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        time.sleep(0.2)
        parent.kill()
        deadline = time.monotonic() + 10
        while _is_alive(int(pid)) or os.path.exists(directory):
            assert time.monotonic() < deadline, "the engine's process outlived its parent"
            time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_request_that_masks_every_token_is_told_so(engine: Engine) -> None:
    params = SamplingParams(max_tokens=5, min_tokens=2, allowed_token_ids=[300], stop_token_ids=[300])
    with pytest.raises(InvalidRequestError, match="no token is left.*min_tokens"):
        engine.run(engine.collect(PROMPTS[0], params))


def test_limits_and_policy_change_while_it_runs(engine: Engine) -> None:
    llm, params = engine.llm, SamplingParams(max_tokens=12, ignore_eos=True, seed=1)

    async def tell() -> None:
        with pytest.raises(InvalidRequestError, match="max_num_seqs=10000 is above 256") as found:
            await llm.set_limits(max_num_seqs=10_000)
        assert found.value.param == "max_num_seqs"
        limits = await llm.set_limits(max_num_seqs=2, policy="priority")
        assert (limits, limits.max_num_seqs, llm.limits.policy) == (llm.limits, 2, "priority")
        several = [llm.generate(prompt, params, priority=place) for place, prompt in enumerate(PROMPTS)]
        await asyncio.gather(*(_last(outputs) for outputs in several))
        assert llm.stats().limits == limits

    async def refuse() -> None:
        await llm.set_limits(policy="deadline", ttft_target=1e-7)
        with pytest.raises(InvalidRequestError, match="priority=1 needs"):
            await _last(llm.generate("Once", params, priority=1))
        await _last(llm.generate("Once", params))  # nothing is measured yet
        with pytest.raises(OverloadedError, match="ttft_target is 1e-07 s") as found:
            await _last(llm.generate("Once", params))
        assert found.value.retry_after == 1
        await _last(llm.generate("Once", params, ttft_target=100.0, client="me"))

    try:
        engine.run(tell())
        engine.run(refuse())
    finally:
        engine.run(llm.set_limits(max_num_seqs=256, policy="fcfs"))
    engine.run(engine.when_idle())


async def _last(outputs: Any) -> RequestOutput:
    return [output async for output in outputs][-1]
