"""Workers in processes, as far as none has to be started."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

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
