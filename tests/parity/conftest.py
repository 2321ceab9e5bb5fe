"""Which kernels our models run on in these tests."""

from collections.abc import Iterator

import pytest

from quire.ops.native.library import TORCH, current_level, levels, set_level


@pytest.fixture
def native() -> Iterator[str]:
    """The best level of compiled kernels, in use; skips where there are none."""
    if levels() == [TORCH]:
        pytest.skip("needs the compiled kernels")
    before = current_level()
    set_level(levels()[0])
    yield levels()[0]
    set_level(before)


@pytest.fixture(params=[TORCH, "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Plain torch, then the best level of compiled kernels: its name."""
    return TORCH if request.param == TORCH else request.getfixturevalue("native")
