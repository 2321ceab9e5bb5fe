"""What all tests share."""

import os
from pathlib import Path

import pytest

# Set before torch is first imported, and for child processes too: the models here are tiny, and two OpenMP threads on a
# busy machine wait for each other at every operation.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The test material beside the repository (../shared/data); a test that needs it skips where it is absent."""
    path = _ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs ../shared/data beside the repository")
    return path
