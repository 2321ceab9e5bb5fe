"""Workers in processes of their own: the same answers, interrupts, and a clear end whatever happens to one of them."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_exactness import VARIANTS, changes_of, engine, facts, requests, run

from quire import LLM, SamplingParams
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, NotYetSupportedError
from quire.executor import processes
from quire.executor.processes import Processes
from quire.executor.remote import RemoteExecutor
from quire.executor.transport import Pipe

MP: dict[str, Any] = {"distributed_executor_backend": "mp"}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, logprobs=0)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that a test started outlives it, and no shared memory has a name."""
    mark, memory = uuid.uuid4().hex, set(Path("/dev/shm").iterdir())
    monkeypatch.setenv("QUIRE_TEST_MARK", mark)
    yield
    end = time.monotonic() + 10
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert not marked(mark)
    assert not [path for path in set(Path("/dev/shm").iterdir()) - memory if "quire" in path.name]


def marked(mark: str) -> list[int]:
    """Other processes that were started with this mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def workers(llm: LLM) -> list[int]:
    executor = llm.llm_engine.executor
    assert isinstance(executor, RemoteExecutor)
    assert isinstance(executor.workers, Processes)
    return [process.pid for process in executor.workers.processes]


def generate_for_ever(llm: LLM, prompts: list[str]) -> None:
    while True:
        llm.generate(prompts, LONG, use_tqdm=False)


@pytest.mark.slow
def test_a_worker_process_answers_is_interrupted_and_ends() -> None:
    prompts = ["Once upon a time", "The", "It was"]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, logprobs=2, ignore_eos=True)
    llm = LLM(model="demo", debug=True)
    expected = [[c.token_ids for c in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm = LLM(model="demo", debug=True, **MP)
    engine = llm.llm_engine
    for i in range(3):
        threading.Timer(0.02 * (i + 1), os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            generate_for_ever(llm, prompts)
        assert not engine.has_unfinished_requests()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [[c.token_ids for c in output.outputs] for output in outputs] == expected
    with pytest.raises(InvalidRequestError, match="logits_processors are Python functions"):
        llm.generate("The", SamplingParams(logits_processors=[lambda ids, logits: logits]), use_tqdm=False)
    with pytest.raises(NotYetSupportedError, match="apply_model needs a model in this process"):
        llm.apply_model(type)
    engine.shutdown()
    engine.shutdown()


@pytest.mark.slow
def test_interrupts_anywhere_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each thing that is done with the shared memory, wherever a Ctrl-C would be let through."""
    one = engine({"model": "demo"}, "float32", **MP)
    params = SamplingParams(temperature=0, max_tokens=100, logprobs=0)
    todo = [(list(range(5, 5 + 9 * i)), params) for i in range(1, 4)]
    expected = run(one, todo, 3)
    calls, num_interrupts = itertools.count(), 0

    def interrupted(name: str) -> None:
        real = getattr(Pipe, name)

        def method(self: Pipe, *given: Any) -> Any:
            nonlocal num_interrupts
            place = next(calls) % 46 if one.core.interrupts._lifted else -1
            num_interrupts += place in (11, 34)
            if place == 11:
                raise KeyboardInterrupt
            result = real(self, *given)
            if place == 34:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(Pipe, name, method)

    for name in ("_put", "_get", "_await", "write", "read"):
        interrupted(name)
    for i, (prompt, _) in enumerate(todo):
        one.add_request(str(i), {"prompt_token_ids": prompt}, params)
    found: dict[str, Any] = {}
    while one.has_unfinished_requests():
        with contextlib.suppress(KeyboardInterrupt):
            found |= {output.request_id: facts(output) for output in one.step()}
    assert [found[str(i)] for i in range(3)] == expected
    assert num_interrupts > 20
    one.executor.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "tier"), [(1, "disk"), (2, "host")])
def test_exactness(model_options, num_ranks: int, tier: str) -> None:
    """Forks, beams, preemption, host memory and disk; the second engine finds the disk's blocks."""
    options, variant = model_options("llama"), VARIANTS[9]._replace(late=False, tier=tier)
    with tempfile.TemporaryDirectory() as folder:
        changes = changes_of(variant, folder) | {"tensor_parallel_size": num_ranks}
        todo = requests(engine(options, "bfloat16").config.model.vocab_size)
        expected = run(engine(options, "bfloat16"), todo, 1)
        for again in (False, True)[: 3 - num_ranks]:
            one = engine(options, "bfloat16", **changes, **MP)
            assert run(one, todo, variant.together) == expected
            assert one.stats().num_preemptions_total > 0
            tiers = one.stats().tiers
            assert tiers is not None
            assert (tiers.disk_hits_total > 0) or not again
            one.executor.stop()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_exactness_with_drafts_and_grammars(num_ranks: int) -> None:
    def answers(**options: Any) -> list[Any]:
        llm = LLM(model="demo", debug=True, num_kv_blocks=512, **options)
        params = [
            SamplingParams(temperature=0.9, seed=2, max_tokens=60, logprobs=1, ignore_eos=True),
            SamplingParams(max_tokens=40, structured_outputs={"regex": "[a-z]{2,6}( [a-z]{2,6}){3,5}"}, seed=3),
            SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        ]
        outputs = llm.generate(["Once upon a time"] * 3, params, use_tqdm=False)
        llm.llm_engine.shutdown()
        return [[(c.token_ids, c.logprobs) for c in output.outputs] for output in outputs]

    drafts = {"method": "draft_model", "model": "demo-draft"}
    assert answers(speculative_config=drafts, tensor_parallel_size=num_ranks, **MP) == answers()


def check_reducing(**options: Any) -> None:
    """Two ranks that add up their parts answer alike alone and in batches, and not as one process does."""
    prompts = [f"Number {i} said" for i in range(6)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, logprobs=1) for i in range(6)]

    def answers(llm: LLM, at_once: int) -> list[Any]:
        parts = [slice(i, i + at_once) for i in range(0, len(prompts), at_once)]
        outputs = [out for part in parts for out in llm.generate(prompts[part], params[part], use_tqdm=False)]
        return [[(c.token_ids, c.logprobs) for c in output.outputs] for output in outputs]

    llm = LLM(model="demo", tensor_parallel_size=2, tp_collective="reduce", num_kv_blocks=512, **options)
    together = answers(llm, 6)
    assert llm.reset_prefix_cache()
    assert answers(llm, 1) == together
    llm.llm_engine.shutdown()
    assert together != answers(LLM(model="demo", num_kv_blocks=512), 6), "as it is said of it"


@pytest.mark.slow
def test_ranks_that_reduce_answer_alike_alone_and_in_batches() -> None:
    check_reducing()


@pytest.mark.slow
def test_what_can_not_be_sent_is_refused_and_the_engine_goes_on() -> None:
    llm = LLM("demo", num_kv_blocks=64, **MP)
    bad: list[tuple[Any, dict[str, Any]]] = [
        ({"prompt": "Once", "cache_salt": "\ud800"}, {}),
        ("Once", {"stop": "\ud800"}),
        ("Once", {"extra_args": {"a": object()}}),
        ("Once", {"extra_args": {"a": 2**70}}),
    ]
    for prompt, params in bad:
        with pytest.raises(InvalidRequestError, match="can't be sent to the engine: "):
            llm.generate(prompt, SamplingParams(max_tokens=2, **params), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="can't be sent to the engine: "):
        llm.llm_engine.add_request("\ud800", "Once", SamplingParams(max_tokens=2))
    (output,) = llm.generate("Once", SamplingParams(max_tokens=2, extra_args={"a": [1]}), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.slow
def test_workers_end_where_no_engine_can_be_built() -> None:
    with pytest.raises(ConfigError, match="max_model_len=256 needs") as caught:
        LLM("demo", num_kv_blocks=1, block_size=16, max_model_len=256, **MP)
    assert not marked(os.environ["QUIRE_TEST_MARK"]), "they have left, though somebody looks at the error"
    assert caught.traceback


@pytest.mark.slow
def test_one_of_two_ranks_dies() -> None:
    llm = LLM(model="demo", tensor_parallel_size=2, num_kv_blocks=512)
    assert len(workers(llm)) == 2
    threading.Timer(0.3, os.kill, (workers(llm)[1], signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 .* ended unexpectedly \(SIGKILL"):
        generate_for_ever(llm, ["The"] * 4)
    assert time.monotonic() - start < 10


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_death_is_told(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it computes; and while all are idle."""
    monkeypatch.setattr(processes, "SILENCE_SECONDS", 1.5)
    llm = LLM(model="demo", **MP)
    [pid] = workers(llm)
    if number == signal.SIGKILL:
        threading.Timer(0.2, os.kill, (pid, number)).start()
        what = r"ended unexpectedly \(SIGKILL; out of memory, perhaps: .*\); last it was computing a step"
    else:
        os.kill(pid, number)
        what = "has given no sign of life for 2 s"
    with pytest.raises(EngineDeadError, match=f'the worker of rank 0 of 1 .* {what}.* after "\\(rank 0\\)"'):
        generate_for_ever(llm, ["The"] * 4)
    with pytest.raises(EngineDeadError, match="no sign|unexpectedly"):
        llm.generate("The", LONG, use_tqdm=False)
    llm.llm_engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_death_while_loading_is_told(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SILENCE_SECONDS", 1.5)
    start = processes.start_child

    def started(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*given, **options)
        os.kill(process.pid, number)
        return process

    monkeypatch.setattr(processes, "start_child", started)
    with pytest.raises(EngineDeadError, match="rank 0 of 1 .*last it was loading the model"):
        LLM(model="demo", **MP)


@pytest.mark.slow
def test_what_a_worker_raises_is_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In loading the error itself; in a step that of an engine that is dead."""
    with pytest.raises(ConfigError, match="kernels='avx1024'|there is no memory for a KV cache"):
        LLM(model="demo", num_kv_blocks=10**9, **MP)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('entrypoints.worker' in word for word in sys.orig_argv):\n"
        "    from quire.worker.runner import ModelRunner\n"
        "    def broken(*given): raise ValueError('sabotage')\n"
        "    ModelRunner.finish = broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    llm = LLM(model="demo", **MP)
    with pytest.raises(EngineDeadError, match=r"rank 0 of 1 .* failed \(ValueError: sabotage\)"):
        llm.generate("The", LONG, use_tqdm=False)
    llm.llm_engine.shutdown()


def test_workers_end_with_their_llm() -> None:
    mark, llm = os.environ["QUIRE_TEST_MARK"], LLM(model="demo", **MP)
    assert marked(mark) == workers(llm)
    del llm
    end = time.monotonic() + 30
    while marked(mark):
        assert time.monotonic() < end, "a worker still runs"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["loading", "busy"])
def test_workers_end_with_their_parent(when: str) -> None:
    script = (
        "from quire import LLM, SamplingParams\n"
        "print('begin', flush=True)\n"
        "llm = LLM(model='demo', distributed_executor_backend='mp')\n"
        "print('ready', flush=True)\n"
        "while True: llm.generate(['The'] * 4, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "begin\n"
    if when == "busy":
        assert parent.stdout.readline() == "ready\n"
    mark = os.environ["QUIRE_TEST_MARK"]
    while len(marked(mark)) < 2:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    parent.stdout.close()
