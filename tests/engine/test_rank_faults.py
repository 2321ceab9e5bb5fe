"""A rank that has no more memory: one error that says which rank, what, and what to do.

The fault is put into the one rank by a `sitecustomize`, which Python imports at the start of its process: a limit of
its address space, which the next large allocation meets.
"""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from test_processes import nothing_left

from quire import LLM, SamplingParams
from quire.errors import EngineDeadError
from quire.ops.native.library import TORCH, levels
from quire.utils.hub import resolve_model_path

__all__ = ["nothing_left"]  # a fixture of all tests here
pytestmark = pytest.mark.nightly

SIZES: dict[str, dict[str, Any]] = {"TP 2": {"tensor_parallel_size": 2}, "PP 2": {"pipeline_parallel_size": 2}}
NO_MEMORY = """
import resource
from pathlib import Path
from quire.worker.runner import ModelRunner
from quire.models.compiled import CompiledModel
from quire.worker.worker import Worker
stages = {"loading": (Worker, "load"), "a kernel": (CompiledModel, "reserve"), "a step": (ModelRunner, "begin")}
owner, name = stages[os.environ["QUIRE_TEST_STAGE"]]
real = getattr(owner, name)
def limited(*given):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
    return real(*given)
setattr(owner, name, limited)
"""


def in_rank_1(home: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The process that is rank 1's runs this first."""
    head = 'if sys.orig_argv[-3] == "1" and "quire.entrypoints.worker" in sys.orig_argv:'
    body = f"import os, sys\n{head}\n{textwrap.indent(text, '    ')}"
    (home / "sitecustomize.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(home))


@pytest.mark.parametrize("stage", ["loading", "a step"])
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_has_no_memory(size: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_rank_1(tmp_path, monkeypatch, NO_MEMORY)
    monkeypatch.setenv("QUIRE_TEST_STAGE", stage)
    failed = r"failed \(MemoryError: .*; `quire plan` says what each rank needs\)"
    # Where the kernels' own memory is not there, which no exception tells.
    aborted = r"ended unexpectedly \(SIGABRT; out of memory, perhaps: 'quire plan' says what it takes\)"
    doing = {"loading": "loading the model", "a step": "computing a step"}[stage]
    told = f"rank 1 of 2 .* ({failed}|{aborted}); last it was {doing}"

    def generate() -> None:
        llm = LLM("demo", num_kv_blocks=512, weight_cache=False, **SIZES[size])
        params = SamplingParams(max_tokens=2, prompt_logprobs=3)  # 400 rows of logits: too large for the heap
        llm.generate([{"prompt_token_ids": [5] * 400}] * 2, params, use_tqdm=False)

    with pytest.raises(EngineDeadError, match=told):
        generate()


def test_a_kernel_has_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Kernels can throw nothing: the rank's process ends, after a line that says how many bytes and what to do."""
    if levels() == [TORCH]:
        pytest.skip("needs the compiled kernels")
    in_rank_1(tmp_path, monkeypatch, NO_MEMORY)
    monkeypatch.setenv("QUIRE_TEST_STAGE", "a kernel")
    ended = r"rank 1 of 2 .* ended unexpectedly \(SIGABRT; out of memory, perhaps: 'quire plan' says what it takes\)"
    with pytest.raises(EngineDeadError, match=f"{ended}; last it was making the KV cache"):
        LLM("demo", num_kv_blocks=512, max_num_batched_tokens=2048, **SIZES["TP 2"])
    line = r"quire: there is no memory for the (\d+) bytes that a kernel works in; lower max_num_batched_tokens"
    found = re.search(line, capfd.readouterr().err)
    assert found is not None
    assert int(found[1]) > 100_000


UNREADABLE = """
from pathlib import Path
from quire.worker.worker import Worker
real = Worker.load
def load(*given, **named):
    if Path(os.environ["QUIRE_TEST_FILE"]).exists():
        raise OSError("the disk is gone")
    return real(*given, **named)
Worker.load = load
"""


@pytest.mark.parametrize("method", ["wake_up", "update_weights"])
def test_a_rank_that_cannot_load_again_is_not_waited_for(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_rank_1(tmp_path, monkeypatch, UNREADABLE)
    gone = tmp_path / "gone"
    monkeypatch.setenv("QUIRE_TEST_FILE", str(gone))
    llm = LLM("demo", num_kv_blocks=512, **SIZES["TP 2"])
    assert method != "wake_up" or llm.sleep()
    gone.touch()
    with pytest.raises(EngineDeadError, match="the workers are no more alike: .*the disk is gone"):
        llm.wake_up() if method == "wake_up" else llm.update_weights(str(resolve_model_path("demo")))
