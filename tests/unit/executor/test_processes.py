"""Workers in processes, as far as none has to be started."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.worker import WorkerConfig
from quire.executor.processes import Processes


def test_more_ranks_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def stop(_: int) -> int:
        raise InterruptedError

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr("quire.executor.processes.make_memory", stop)
    for num_ranks in (2, 3):
        config: Any = SimpleNamespace(num_ranks=num_ranks)
        with pytest.raises(InterruptedError):
            Processes("auto").start(config)
    assert caplog.messages == ["3 ranks on 2 cores: slower; lower tensor_ or pipeline_parallel_size"]


def test_a_start_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_child(*arguments: Any, **fields: Any) -> None:
        raise OSError("no further process")

    monkeypatch.setattr("quire.executor.processes.shared_bytes", lambda config: 4096)
    monkeypatch.setattr("quire.executor.processes.start_child", start_child)
    workers, config = Processes("none"), WorkerConfig.__new__(WorkerConfig)
    monkeypatch.setattr(WorkerConfig, "num_ranks", 2)
    monkeypatch.setattr("dataclasses.replace", lambda config, **fields: config)
    monkeypatch.setattr("quire.executor.processes.Lines.of", lambda *given: None)  # a mapping has a descriptor, too
    before = {*os.listdir("/proc/self/fd")}
    with pytest.raises(OSError, match="no further process"):
        workers.start(config)
    assert {*os.listdir("/proc/self/fd")} <= before
