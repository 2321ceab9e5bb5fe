"""The backends that the tests in this directory run on, and the way to their helper modules."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.attention.base import AttentionBackend
from quire.attention.registry import select_backend
from quire.ops.native.library import TORCH, levels

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "ops")]  # paged, native_cases


@pytest.fixture(params=["reference", *(name for name in levels() if name != TORCH)])
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    """The reference, then the native backend on each level of kernels there is."""
    if request.param == "reference":
        yield select_backend("reference")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_KERNELS", request.param)
        yield select_backend("native")
