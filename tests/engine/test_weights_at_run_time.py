"""Engines sleep, wake up and take other weights: memory falls, answers stay or change, and no stale prefix is hit."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import InvalidRequestError, NotYetSupportedError, OverloadedError, RequestFailedError
from quire.protocol.cache import CacheLayout
from quire.utils.hub import resolve_model_path
from quire.worker.worker import Worker

DEMO = resolve_model_path("demo")
PROMPTS = ["Once upon a time there was a king who had", "The captain said that he would never go back to the island"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
OPTIONS = {"num_kv_blocks": 64, "block_size": 8, "show_progress": False}
DRAFT = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}
EAGLE = {"method": "eagle", "model": "demo-eagle", "num_speculative_tokens": 3}


def answers(llm: LLM) -> list[Any]:
    found = []
    for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
        one = output.outputs[0]
        found.append(
            (one.token_ids, [sorted((i, each.logprob) for i, each in step.items()) for step in one.logprobs or []])
        )
    return found


def cached(llm: LLM) -> list[int | None]:
    return [output.num_cached_tokens for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint of the demo."""
    folder = tmp_path_factory.mktemp("other")
    tensors = load_file(DEMO / "model.safetensors")
    save_file({n: t * 1.05 if "layers.2" in n else t for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def start() -> Iterator[Callable[..., LLM]]:
    running: list[LLM] = []

    def go(**options: Any) -> LLM:
        running.append(LLM("demo", **OPTIONS, **options))
        return running[-1]

    yield go
    for llm in running:
        llm.llm_engine.shutdown()


def check_weights(llm: LLM, other: Path) -> None:
    """All of it, once."""
    before = answers(llm)
    assert min(cached(llm)) >= 8  # type: ignore[type-var]
    assert llm.sleep()
    assert llm.is_sleeping()
    with pytest.raises(OverloadedError, match="wake it up|wake them up"):
        answers(llm)
    llm.wake_up()
    assert not llm.is_sleeping()
    assert cached(llm) == [0, 0]
    assert answers(llm) == before
    assert llm.update_weights(other)
    assert cached(llm) == [0, 0]
    changed = answers(llm)
    assert changed != before
    assert llm.sleep(level=1, mode="wait")
    llm.wake_up(["weights"])
    assert llm.is_sleeping()
    llm.wake_up(["kv_cache"])
    assert answers(llm) == changed, "level 1 keeps what it had"
    for nowhere in ("/nowhere", "~nobody-is-called-so/x"):
        with pytest.raises(RequestFailedError, match="nowhere|so/x"):
            llm.update_weights(nowhere)
    assert answers(llm) == changed
    assert llm.sleep(level=2)
    llm.wake_up()
    assert answers(llm) == before, "level 2 does not"
    assert llm.sleep(level=2)
    assert llm.update_weights(other)
    assert llm.is_sleeping()
    llm.wake_up()
    assert answers(llm) == changed
    llm.llm_engine.check_integrity()


@pytest.mark.slow
def test_stats_tell_how_deep_an_engine_sleeps(start: Callable[..., LLM]) -> None:
    """Whoever put it to sleep."""
    llm = start()
    for level, state in ((1, "weights_offloaded"), (2, "discard_all")):
        assert llm.llm_engine.stats().sleep_state == "awake"
        assert llm.sleep(level)
        assert llm.llm_engine.stats().sleep_state == state
        llm.wake_up(["weights"])
        assert llm.llm_engine.stats().sleep_state == state
        llm.wake_up(["kv_cache"])
    assert llm.llm_engine.stats().sleep_state == "awake"


def test_weights_that_are_refused_leave_nothing_behind(start: Callable[..., LLM]) -> None:
    """Not even what workers know of requests that have ended, of which there is room for twice max_num_seqs."""
    llm = start(max_num_seqs=2)
    before = answers(llm)
    for _ in range(5):
        with pytest.raises(RequestFailedError, match="nowhere"):
            llm.update_weights("/nowhere")
        llm.llm_engine.check_integrity()
        assert answers(llm) == before


def test_a_cache_that_finds_no_memory_may_be_asked_for_again(
    start: Callable[..., LLM], other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_left(worker: Worker, layout: CacheLayout) -> None:
        raise MemoryError("no memory for the cache")

    llm = start()
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "initialize_cache", nothing_left)
        with pytest.raises(RequestFailedError, match="no memory for the cache"):
            llm.update_weights(other)
        assert llm.is_sleeping()
        with pytest.raises(OverloadedError, match="wake it up"):
            answers(llm)
        with pytest.raises(RequestFailedError, match="no memory for the cache"):
            llm.wake_up()
    llm.wake_up()
    found = answers(llm)
    assert llm.update_weights(other)
    assert answers(llm) == found


@pytest.mark.slow
def test_an_engine_in_this_process(start: Callable[..., LLM], other: Path) -> None:
    check_weights(start(), other)


@pytest.mark.parametrize("options", [{"kernels": "torch"}, {"quantization": "int4"}, {"dtype": "float32"}])
@pytest.mark.nightly
def test_other_kernels_and_formats(start: Callable[..., LLM], other: Path, options: dict[str, Any]) -> None:
    check_weights(start(**options), other)


@pytest.mark.nightly
@pytest.mark.parametrize("speculative", [DRAFT, EAGLE], ids=["draft", "eagle"])
def test_what_drafts_sleeps_too(start: Callable[..., LLM], other: Path, speculative: dict[str, Any]) -> None:
    check_weights(start(speculative_config=speculative), other)


@pytest.mark.slow
def test_ranks_of_a_tensor_group(start: Callable[..., LLM], other: Path) -> None:
    llm = start(tensor_parallel_size=2)
    check_weights(llm, other)
    assert len(llm.collective_rpc("reset")) == 2
    with pytest.raises(RequestFailedError, match="call: AttributeError"):
        llm.collective_rpc("call", args=(5,))
    with pytest.raises(NotYetSupportedError, match="in this process"):
        llm.collective_rpc(lambda worker: worker)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"distributed_executor_backend": "mp"},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
    ],
)
def test_processes_stages_and_engines(start: Callable[..., LLM], other: Path, options: dict[str, Any]) -> None:
    check_weights(start(**options), other)


@pytest.mark.slow
def test_tensors_by_name(start: Callable[..., LLM], other: Path) -> None:
    llm, tensors = start(), load_file(DEMO / "model.safetensors")
    before = answers(llm)
    wrong = [
        ("lacks 1 of .*up_proj", {name: each for name, each in tensors.items() if "3.mlp.up_proj" not in name}),
        (r"'model.norm.weight' has the shape \(3,\)", tensors | {"model.norm.weight": torch.ones(3)}),
        ("is of type int8", tensors | {"model.norm.weight": torch.ones(256, dtype=torch.int8)}),
        ("'model.extra'.* no place", tensors | {"model.extra": torch.ones(3)}),
    ]
    for text, given in wrong:
        with pytest.raises(RequestFailedError, match=text):
            llm.update_weights(given.items())
        assert answers(llm) == before
    assert llm.update_weights(load_file(other / "model.safetensors").items())
    changed = answers(llm)
    assert changed != before
    llm.sleep()
    llm.wake_up()
    assert answers(llm) == changed


@pytest.mark.slow
def test_nothing_happens_while_requests_run(start: Callable[..., LLM], other: Path) -> None:
    llm = start()
    llm.llm_engine.add_request("a", PROMPTS[0], GREEDY)
    assert not llm.sleep()
    assert not llm.update_weights(other)
    assert not llm.is_sleeping()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert llm.sleep()
    assert llm.sleep(), "deeper"


def test_vllms_way_to_wake_up(start: Callable[..., LLM]) -> None:
    """Waking has loaded the weights; vLLM's has to be told to, and TRL tells it."""
    llm = start()
    before = answers(llm)
    with pytest.raises(RequestFailedError, match=r"^reload_weights: .* use update_weights\(FOLDER\)"):
        llm.collective_rpc("reload_weights")
    assert llm.sleep(level=2)
    with pytest.raises(RequestFailedError, match="a worker that sleeps has no method 'reload_weights'"):
        llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["weights"])
    assert llm.collective_rpc("reload_weights") == [None]
    llm.wake_up(tags=["kv_cache"])
    assert answers(llm) == before


def test_c_libraries_whose_heap_can_not_be_trimmed(start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.keeper.ctypes", SimpleNamespace(CDLL=lambda name: object()))  # macOS's, musl
    llm = start()
    before = answers(llm)
    assert llm.sleep()
    llm.wake_up()
    assert answers(llm) == before


def test_wrong_words_are_refused(start: Callable[..., LLM]) -> None:
    llm = start()
    for level in (0, 3, "1", 1.0, True):
        with pytest.raises(InvalidRequestError, match="level must be 1 or 2"):
            llm.sleep(level)  # type: ignore[arg-type]
    wrong_tags: list[Any] = [["wieghts"], "weights", 5, [5], [[]]]
    for tags in wrong_tags:
        with pytest.raises(InvalidRequestError, match="^tags must be a list of 'weights' and 'kv_cache'; it is "):
            llm.wake_up(tags)
    with pytest.raises(InvalidRequestError, match="^mode must be 'abort', 'wait' or 'keep'; it is 'nope'"):
        llm.sleep(1, "nope")
    with pytest.raises(InvalidRequestError, match="^func must be a function of the model; it is 5"):
        llm.apply_model(5)  # type: ignore[arg-type]
    for name in ("nothing", "_load", "__init__"):
        with pytest.raises(RequestFailedError, match=f"no method '{name}'"):
            llm.collective_rpc(name)
    with pytest.raises(RequestFailedError, match="update_weights: .*argument"):
        llm.collective_rpc("update_weights")
    with pytest.raises(RequestFailedError, match=r"^call: AttributeError\(.'int' object has no"):
        llm.collective_rpc("call", args=(5,))  # whatever it raises: the engine goes on
    assert llm.collective_rpc(lambda worker, plus: worker.device.num_threads + plus, args=(1,)) == [2]
    with pytest.raises(InvalidRequestError, match="timeout"):
        llm.collective_rpc("reset", timeout=1.0)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("method", {"method": 5}),
        ("method", {"method": None}),
        ("args", {"method": "reset", "args": 5}),
        ("kwargs", {"method": "reset", "kwargs": {"level": 1}}),
        ("kwargs", {"method": lambda worker: None, "kwargs": 5}),
    ]
    for name, given in wrong:
        with pytest.raises(InvalidRequestError, match=f"^{name} must be a .*; it is {given[name]!r}.$"):
            llm.collective_rpc(**given)
    for weights in (5, None, ["x"], [("a", 1)], [(1, torch.ones(1))], {"a": torch.ones(1)}):
        with pytest.raises(InvalidRequestError, match="^weights must be a checkpoint's directory, or pairs of a name"):
            llm.update_weights(weights)  # type: ignore[arg-type]


@pytest.mark.slow
def test_prefixes_on_the_disk(start: Callable[..., LLM], other: Path, tmp_path: Path) -> None:
    """They outlive a sleep, as the same tokens make the same blocks, but no change of weights."""
    folder = {"kv_cache_dir": str(tmp_path / "blocks"), "swap_space": 0.01}
    llm = start(**folder)
    before = answers(llm)
    llm.sleep()
    llm.wake_up()
    assert min(cached(llm)) >= 8  # type: ignore[type-var]
    assert answers(llm) == before
    llm.update_weights(other)
    assert cached(llm) == [0, 0]
    changed = answers(llm)
    llm.llm_engine.shutdown()
    shutil.copytree(
        DEMO, tmp_path / "whole", ignore=shutil.ignore_patterns("eagle*", "medusa", "draft", "*.safetensors")
    )
    shutil.copyfile(other / "model.safetensors", tmp_path / "whole" / "model.safetensors")
    fresh = LLM(str(tmp_path / "whole"), **OPTIONS, **folder)
    assert answers(fresh) == changed
    fresh.llm_engine.shutdown()


MEMORY = """
from quire import LLM, SamplingParams

def main():
    wide = {"vocab_size": 4096, "intermediate_size": 32768}
    llm = LLM("demo", load_format="dummy", hf_overrides=wide, num_kv_blocks=64, show_progress=False)
    def taken():
        llm.generate("Once upon a time", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        return resident()
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096
    awake = taken()
    for level in (1, 2):
        llm.sleep(level)
        asleep = resident()
        llm.wake_up()
        print(awake, asleep, taken())

main()
"""


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_falls_and_comes_back() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, env=os.environ, check=True)
    weights = 3 * 5 * 256 * 32768 * 2  # bytes of the MLPs alone
    lines = done.stdout.splitlines()[-2:]
    for line in lines:
        awake, asleep, again = map(int, line.split())
        assert asleep < awake - 0.9 * weights
        assert abs(again - awake) < 0.25 * weights
