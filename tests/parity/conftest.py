"""Which kernels our models run on in these tests."""

import pytest

from quire.ops.native.library import TORCH, levels


@pytest.fixture
def native() -> str:
    """The best level of compiled kernels; skips where there are none."""
    if levels() == [TORCH]:
        pytest.skip("needs the compiled kernels")
    return levels()[0]


@pytest.fixture(params=[TORCH, "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Plain torch, then the best level of compiled kernels: its name."""
    return TORCH if request.param == TORCH else request.getfixturevalue("native")
