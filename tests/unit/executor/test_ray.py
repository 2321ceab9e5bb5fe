"""Ray's workers as far as they need no Ray: where ranks go, and the extra's name where it is missing."""

import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM
from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError, ModelLoadError
from quire.executor.orders import FAULT, decoded
from quire.executor.ray import Actors, placed
from quire.executor.remote import RemoteExecutor

TP, PP, DP = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"


@pytest.mark.parametrize(
    ("nodes", "options", "expected"),
    [
        ([8], {TP: 2}, (4, 1)),
        ([8, 8], {TP: 2}, (4, 1)),  # in one node, where ranks meet in its memory
        ([8, 8], {TP: 2, "ray_placement": "STRICT_SPREAD"}, (8, 2)),
        ([3, 1], {TP: 2, "ray_placement": "STRICT_SPREAD"}, (1, 2)),
        ([1, 1], {TP: 2}, (1, 2)),
        ([1, 1], {TP: 2, "ray_placement": "STRICT_PACK"}, (0, 1)),
        ([8, 4], {TP: 2, PP: 2}, (2, 2)),  # each stage on a node of its own
        ([8, 1], {TP: 2, PP: 2}, (2, 2)),  # both on one
        ([3, 1], {TP: 2, PP: 2}, (1, 4)),
        ([8, 8], {TP: 2, PP: 2, "ray_placement": "STRICT_PACK"}, (2, 1)),
        ([8, 8], {DP: 2}, (8, 1)),
        ([8, 8], {DP: 4, PP: 2}, (2, 2)),
        ([1, 1], {TP: 3}, (0, 1)),
        ([], {}, (0, 1)),
    ],
)
def test_placed(nodes: list[int], options: dict[str, Any], expected: tuple[int, int]) -> None:
    """CPUs of each rank, and bundles."""
    assert placed(nodes, EngineArgs(**options))[:2] == expected


def test_a_missing_ray_is_told_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="needs Ray: pip install ray"):
        LLM("demo", distributed_executor_backend="ray")


class _RayError(Exception): ...


class _RayTaskError(_RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _PlayedRay:
    """Answers that were given, in place of references to them; an exception is raised."""

    exceptions = SimpleNamespace(RayError=_RayError, RayTaskError=_RayTaskError)

    def get(self, answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_what_fails_around_an_actors_rank_is_its_fault() -> None:
    """As the place where ranks find each other, which an actor makes before its rank is told anything."""
    actors = Actors(EngineArgs())
    actors._ray = _PlayedRay()
    later = _RayError("no answer yet")
    actors._answers = [deque([None, (1, b"x")]), deque([later]), deque([_RayTaskError(ImportError("no torch"))])]
    assert actors.receive(0, 0.0) == (1, b"x")
    assert actors.receive(0, 0.0) is None
    assert actors.receive(1, 0.0) is None
    number, body = actors.receive(2, 0.0) or (-1, b"")
    assert (number, decoded(body, tuple[str, str])) == (FAULT, ("ImportError", "no torch"))


def test_an_error_of_one_node_names_it() -> None:
    """As where the model's files are on the others alone."""
    actors = Actors(EngineArgs())
    actors._places = [("1", f"192.0.2.{rank} {'ab' * 28}", 70 + rank, "") for rank in range(2)]
    config: Any = SimpleNamespace(num_ranks=2, num_stages=1, nodes=("192.0.2.0", "192.0.2.1"))
    with pytest.raises(ModelLoadError, match=r"^no weights \(process 71 on Ray's node 192.0.2.1 abababab\)$"):
        RemoteExecutor(config, actors)._fail(1, "ModelLoadError", "no weights")
