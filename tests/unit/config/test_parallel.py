"""Options of parallelism: what nothing carries out is refused by name."""

from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.config.parallel import ParallelConfig
from quire.errors import ConfigError, NotYetSupportedError


@pytest.mark.parametrize(
    ("name", "value"),
    [("distributed_executor_backend", "ray")],
)
def test_what_is_not_there_yet_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(NotYetSupportedError, match=f"{name}={value!r} is not supported yet; use "):
        EngineArgs(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 0),
        ("distributed_executor_backend", "threads"),
        ("tp_collective", "sum"),
        ("cpu_bind", "0"),
    ],
)
def test_what_is_no_value_is_a_config_error(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineArgs(**{name: value})


def test_one_process_is_the_default() -> None:
    assert EngineArgs().parallel == ParallelConfig()
    assert ParallelConfig().num_ranks == 1
