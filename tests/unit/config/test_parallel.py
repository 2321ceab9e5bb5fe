"""Options of parallelism: what is no value of theirs is refused by name."""

from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import ConfigError


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
    assert EngineArgs().num_ranks == 1
