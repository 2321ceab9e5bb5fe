"""The kernels run on tensors of the CPU, interpreted, unless there is a GPU; without Triton these tests are skipped."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels import uninstall

pytest.importorskip("triton")


@pytest.fixture
def installed() -> Iterator[str]:
    """The device whose tensors go to the kernels, for the duration of a test."""
    from quire.ops.triton import install

    device = "cuda" if torch.cuda.is_available() else "cpu"
    install(device)
    yield device
    uninstall()
