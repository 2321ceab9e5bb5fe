"""Prefixes outlive the engine on the disk, and nothing that is found there ever changes a bit, or ends a server."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_exactness import drain, engine, requests, run

from quire import EngineArgs, LLMEngine, SamplingParams
from quire.errors import ConfigError, RequestFailedError
from quire.protocol.stats import TierStats
from quire.worker.blockfiles import BlockFiles
from tests.waiting import wait_until

SMALL = {"block_size": 8, "max_model_len": 128, "enable_prefix_caching": True, "swap_space": 0.01}
LONG = [9, *range(20, 90)]


def tiers(one: LLMEngine) -> TierStats:
    found = one.stats().tiers
    assert found is not None
    return found


@pytest.fixture
def start(model_options, tmp_path: Path) -> Iterator[Callable[..., LLMEngine]]:
    """Starts engines on one folder, and ends each before the next; `start("llama")`."""
    running: list[LLMEngine] = []

    def go(model: str = "llama", **changes: Any) -> LLMEngine:
        for one in running:
            one.executor.stop()
        options: dict[str, Any] = SMALL | {"kv_cache_dir": str(tmp_path / "blocks")} | changes
        running[:] = [engine(model_options(model), "bfloat16", **options)]
        return running[0]

    yield go
    for one in running:
        one.executor.stop()


def answer(one: LLMEngine, prompt: list[int]) -> Any:
    one.add_request("a", prompt, SamplingParams(temperature=0.8, seed=3, max_tokens=6, logprobs=2, ignore_eos=True))
    return drain(one)["a"]


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_a_restarted_engine_finds_its_prefixes(start: Callable[..., LLMEngine], model: str) -> None:
    first = start(model)
    expected = answer(first, LONG)
    second = start(model)
    assert answer(second, LONG) == expected
    assert second.stats().prefix_cache_hits_total == 64
    assert tiers(second).disk_hits_total >= 8
    assert tiers(second).disk_misses_total == 0
    assert answer(second, LONG[:50]) == answer(start(model, kv_cache_dir=None), LONG[:50])


def test_what_the_last_step_computed_is_written_too(start: Callable[..., LLMEngine]) -> None:
    """The engine is idle when the last output is returned, though nobody steps it any more."""
    first = start()
    first.add_request("a", LONG, SamplingParams(max_tokens=1, temperature=0, logprobs=1))
    expected = drain(first)["a"]
    assert not first.core.has_unfinished()
    assert first.core.call("sleep")
    second = start()
    second.add_request("a", LONG, SamplingParams(max_tokens=1, temperature=0, logprobs=1))
    assert drain(second)["a"] == expected
    assert second.stats().prefix_cache_hits_total == 64


def test_blocks_that_wait_to_be_written_are_no_request(start: Callable[..., LLMEngine]) -> None:
    """One of several engines would say that it can't sleep, and the others would."""
    first = start()
    core = first.core
    core.add(first.process_input("a", LONG, SamplingParams(max_tokens=1, temperature=0)).request)
    while not any(item.finish_reason for item in core.step()):
        pass
    assert core.has_unfinished(), "the last step's blocks are handed over by the next"
    assert core.call("sleep")
    second = start()
    answer(second, LONG)
    assert second.stats().prefix_cache_hits_total == 64


@pytest.mark.parametrize("ended", [False, True])
def test_blocks_that_a_sleep_has_lost_are_not_written(start: Callable[..., LLMEngine], ended: bool) -> None:
    """Once the engine wakes up those blocks hold something else, and no file says that it is the wrong one."""
    expected = answer(start(kv_cache_dir=None), LONG)
    one = start()
    one.add_request("kept", [5, 6, 7], SamplingParams(max_tokens=20, logprobs=0, ignore_eos=True))
    one.add_request("done", LONG, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while not any(output.request_id == "done" and output.finished for output in one.step()):
        pass
    one.core.call("sleep", 1, True)
    if ended:
        one.abort_request("kept")
        one.step()
    one.core.call("wake_up", None)
    drain(one)
    assert answer(one, LONG) == expected
    assert answer(start(), LONG) == expected


def test_counts_never_go_back(start: Callable[..., LLMEngine]) -> None:
    """Who wakes up counts from 0, and Prometheus takes a counter that falls for a restart."""
    one = start()
    answer(one, LONG)
    wait_until(lambda: answer(one, [5, 6]) and tiers(one).disk_written_blocks_total == 9, 10)
    assert one.core.call("sleep")
    one.core.call("wake_up", None)
    answer(one, [*range(30, 60)])
    wait_until(lambda: answer(one, [5, 6]) and tiers(one).disk_written_blocks_total == 13, 10)


def test_no_step_waits_for_a_disk_that_hangs(
    start: Callable[..., LLMEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is to be written is handed over; who puts the engine to sleep waits for it, but not for ever."""
    goes_on = threading.Event()
    write = BlockFiles._write
    monkeypatch.setattr(BlockFiles, "_write", lambda *arguments: goes_on.wait(60) and write(*arguments))
    monkeypatch.setattr("quire.worker.blockfiles.CLOSING_SECONDS", 0.1)
    one = start()
    answer(one, LONG)
    assert not one.core.has_unfinished()
    assert tiers(one).disk_written_blocks_total == 0
    assert one.core.call("sleep")
    assert "blocks hangs" in caplog.text
    goes_on.set()


def test_weights_that_are_refused_leave_the_disk_open(start: Callable[..., LLMEngine]) -> None:
    first = start()
    answer(first, LONG)
    with pytest.raises(RequestFailedError, match="nowhere"):
        first.core.call("update_weights", "/nowhere")
    other = [7, *LONG]
    answer(first, other)
    second = start()
    answer(second, other)
    assert second.stats().prefix_cache_hits_total == 64
    answer(second, LONG)
    assert second.stats().prefix_cache_hits_total == 128


@pytest.mark.slow
def test_many_requests_are_what_they_were(start: Callable[..., LLMEngine], model_options) -> None:
    alone = engine(model_options("llama"), "bfloat16", block_size=8, max_model_len=128)
    todo = requests(alone.config.model.vocab_size)[:12]
    expected = run(alone, todo, together=1)
    assert run(start(), todo, together=7) == expected
    late = start(late=True, num_kv_blocks=16)
    assert run(late, todo, together=7) == expected
    assert tiers(late).disk_hits_total > 10
    assert tiers(late).num_swaps_total > 0


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [damage, Path.unlink], ids=["damaged", "gone"])
def test_damaged_files_are_computed_anew(start: Callable[..., LLMEngine], tmp_path: Path, harm: Any) -> None:
    expected = answer(start(), LONG)
    second = start()
    for path in list(tmp_path.rglob("*.kv"))[::2]:
        harm(path)
    assert answer(second, LONG) == expected
    assert tiers(second).disk_misses_total > 0
    assert (tiers(second).disk_damaged_files_total > 0) == (harm is damage)
    third = start()
    assert answer(third, LONG) == expected
    assert third.stats().prefix_cache_hits_total == 64, "what was lost is written again"


@pytest.mark.parametrize("change", [{"seed": 5}, {"block_size": 16}, {"kernels": "torch"}], ids=str)
def test_what_other_engines_have_kept_is_foreign(start: Callable[..., LLMEngine], change: dict[str, Any]) -> None:
    answer(start(), LONG)
    other = start(**change)
    answer(other, LONG)
    assert tiers(other).disk_hits_total == other.stats().prefix_cache_hits_total == 0


def test_a_disk_that_takes_nothing_stops_nobody(
    start: Callable[..., LLMEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blocks").write_text("a file stands where the folder should be")
    one = start()
    expected = answer(one, LONG)
    one.executor.stop()
    again = start()
    assert answer(again, LONG) == expected
    answer(again, LONG[:9])
    assert caplog.text.count("kv_cache_dir: blocks can't all be kept") == 2


def test_a_reset_closes_the_disk(start: Callable[..., LLMEngine]) -> None:
    one = start()
    answer(one, LONG)
    assert one.reset_prefix_cache(reset_connector=True)
    answer(one, LONG)
    assert one.stats().prefix_cache_hits_total == 0


def test_a_reset_of_the_engine_keeps_the_disk(start: Callable[..., LLMEngine], tmp_path: Path) -> None:
    """The weights are the same, and so are the blocks; as vLLM keeps what its connectors have."""
    one = start()
    expected = answer(one, LONG)
    wait_until(lambda: len(list(tmp_path.rglob("*.kv"))) >= 8)  # what is not written yet, is computed again
    for times in (1, 2):
        assert one.reset_prefix_cache()
        assert answer(one, LONG) == expected
        assert one.stats().prefix_cache_hits_total == 64 * times
        assert tiers(one).disk_hits_total == 8 * times


TOUCHES: list[Callable[[LLMEngine], Any]] = [
    lambda one: one.apply_model(lambda model: None),
    lambda one: one.core.call("call_workers", "reset", []),
    lambda one: one.reset_prefix_cache(reset_connector=True),
]


@pytest.mark.parametrize("touch", TOUCHES)
def test_whoever_may_have_changed_weights_closes_the_disk(
    start: Callable[..., LLMEngine], touch: Callable[[LLMEngine], Any], tmp_path: Path
) -> None:
    """Before or after prefixes are forgotten; nor is anything written there any more."""
    for order in ((touch, LLMEngine.reset_prefix_cache), (LLMEngine.reset_prefix_cache, touch)):
        one = start()
        answer(one, LONG)
        num_hits = one.stats().prefix_cache_hits_total
        for act in order:
            act(one)
        answer(one, LONG)
        answer(one, LONG[::-1])
        assert one.stats().prefix_cache_hits_total == num_hits
        one.executor.stop()
        assert len([*(tmp_path / "blocks").glob("*/*/*.kv")]) <= 9, "those of the first answer"


def test_weights_that_are_loaded_have_blocks_on_the_disk_again(tmp_path: Path) -> None:
    """Their files are found under their own name, whatever was done to those before them."""
    args: dict[str, Any] = SMALL | {"kv_cache_dir": str(tmp_path), "num_kv_blocks": 40}
    one = LLMEngine.from_engine_args(EngineArgs(model="demo", **args), show_progress=False)
    one.apply_model(lambda model: None)
    assert one.core.call("update_weights", str(one.config.model.path))
    expected = answer(one, LONG)
    wait_until(lambda: len(list(tmp_path.rglob("*.kv"))) >= 8)
    assert one.reset_prefix_cache()
    assert answer(one, LONG) == expected
    assert tiers(one).disk_hits_total == 8
    one.executor.stop()


def test_options_that_contradict_it() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dir needs swap_space"):
        EngineArgs(kv_cache_dir="x", swap_space=0)
    with pytest.raises(ConfigError, match="needs enable_prefix_caching=True"):
        EngineArgs(kv_cache_dir="x", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="kv_cache_dir_size"):
        EngineArgs(kv_cache_dir_size=0)
