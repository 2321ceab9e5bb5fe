"""Which kernels our models run on in these tests."""

import pytest

from quire.ops.native.library import TORCH, levels
from quire.ops.native.matrix import weight_order
from quire.ops.native.structs import Type


@pytest.fixture
def native() -> str:
    """The best level of compiled kernels; skips where there are none."""
    if levels() == [TORCH]:
        pytest.skip("needs the compiled kernels")
    return levels()[0]


@pytest.fixture
def multiplying_numbers(native: str) -> str:
    """The best level at which weights in blocks are multiplied as the numbers that a dequantized model has."""
    return next(level for level in levels() if not weight_order(level, Type.Q8_0)[1])


@pytest.fixture(params=[TORCH, "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Plain torch, then the best level of compiled kernels: its name."""
    return TORCH if request.param == TORCH else request.getfixturevalue("native")
